/* The type Binary: a kernel whose parameters are its caller's business, as Triton's launches have it. */
#include "loaded_kernel.h"

#include <limits.h>
#include <stdio.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    LoadedKernel kernel;
} BinaryObject;

PyObject *binary_new(PyTypeObject *type, DriverObject *driver, PyObject *args, PyObject *keywords) {
    static char *names[] = {"", "", "shared", NULL};
    PyObject *image, *name;
    int shared = INT_MIN;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "SU|$i:binary", names, &image, &name, &shared)) return NULL;
    if (shared < 0) return PyErr_Format(PyExc_ValueError, "binary() needs shared, at least 0 bytes");
    BinaryObject *self = (BinaryObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    loaded_kernel_init(&self->kernel, driver);
    self->kernel.code.shared = (unsigned)shared;
    self->kernel.code.any_time = 1;
    if (loaded_kernel_set(&self->kernel, image, name) < 0 || loaded_kernel_load(&self->kernel) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void binary_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    loaded_kernel_free(&((BinaryObject *)object)->kernel);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *binary_prepare(PyObject *object, PyObject *value) {
    LoadedKernel *self = &((BinaryObject *)object)->kernel;
    const DriverLibrary *library = &self->driver->library;
    KernelFacts facts = {0};
    Outcome outcome;
    int device;
    if (read_device(value, library->device_count, &device) < 0) return NULL;
    if (check_not_forked(self->driver) < 0) return NULL;
    if (loaded_kernel_prepare(self, device) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    outcome = library->backend->facts(library, &self->code, device, &facts);
    Py_END_ALLOW_THREADS
    if (outcome.call != NULL) {
        char doing[64];
        snprintf(doing, sizeof doing, "reading its registers on device %d", device);
        raise_kernel_error(self, outcome, doing);
        return NULL;
    }
    unsigned long long function = (unsigned long long)(uintptr_t)code_function(&self->code, device);
    return Py_BuildValue("(Kiii)", function, facts.registers, facts.local_bytes, facts.max_threads);
}

PyDoc_STRVAR(binary_doc, "One kernel of a loaded image; Driver.binary makes them. Unloads it when freed.");
PyDoc_STRVAR(prepare_doc,
             "prepare($self, device, /)\n--\n\n"
             "Load it onto a device; (function, registers, local bytes a thread, most threads a block).");

static PyMethodDef binary_methods[] = {
    {"prepare", binary_prepare, METH_O, prepare_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef binary_members[] = {
    {"name", T_OBJECT_EX, offsetof(BinaryObject, kernel.name), READONLY, "the kernel's name in its image"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot binary_slots[] = {
    {Py_tp_doc, (void *)binary_doc},
    {Py_tp_dealloc, binary_dealloc},
    {Py_tp_methods, binary_methods},
    {Py_tp_members, binary_members},
    {0, NULL},
};

PyType_Spec binary_type_spec = {
    .name = "liger_aot._launch.Binary",
    .basicsize = sizeof(BinaryObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = binary_slots,
};
