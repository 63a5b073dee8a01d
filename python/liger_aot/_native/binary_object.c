/* The type Binary: a kernel whose parameters are its caller's business, as Triton's launches have it. */
#include "module.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    DriverObject *driver;
    PyObject *name;
    PyObject *image; /* HIP reads it when a device first needs it */
    Code code;
} BinaryObject;

static void raise_binary_error(const BinaryObject *self, Outcome outcome, const char *doing) {
    char text[512];
    snprintf(text, sizeof text, "%s (kernel %.200s, %u bytes of shared memory)", doing, self->code.name,
             self->code.shared);
    raise_driver_error(self->driver, outcome, text);
}

static int load_code(BinaryObject *self) {
    Outcome outcome;
    if (check_not_forked(self->driver) < 0) return -1;
    Py_BEGIN_ALLOW_THREADS
    outcome = code_load(&self->driver->library, &self->code);
    Py_END_ALLOW_THREADS
    if (outcome.call == NULL) return 0;
    raise_binary_error(self, outcome, "loading the image");
    return -1;
}

PyObject *binary_new(PyTypeObject *type, DriverObject *driver, PyObject *args, PyObject *keywords) {
    static char *names[] = {"", "", "shared", NULL};
    PyObject *image, *name;
    int shared = INT_MIN;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "SU|$i:binary", names, &image, &name, &shared)) return NULL;
    if (shared < 0) return PyErr_Format(PyExc_ValueError, "binary() needs shared, at least 0 bytes");
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(name, &size);
    if (text == NULL) return NULL;
    if (strlen(text) != (size_t)size) return PyErr_Format(PyExc_ValueError, "name %R has a null character", name);

    BinaryObject *self = (BinaryObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    pthread_mutex_init(&self->code.preparing, NULL); /* default attributes: cannot fail on Linux */
    Py_INCREF(driver);
    self->driver = driver;
    Py_INCREF(name);
    self->name = name;
    Py_INCREF(image);
    self->image = image;
    self->code.name = text;
    self->code.image = PyBytes_AsString(image);
    self->code.shared = (unsigned)shared;
    self->code.any_time = 1;
    if (load_code(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (self->code.library != NULL) { /* the driver has a copy, which serves all devices */
        self->code.image = NULL;
        Py_CLEAR(self->image);
    }
    return (PyObject *)self;
}

/* Unloading may wait for the device, and a callback there may wait for the GIL. */
static void unload_code(BinaryObject *self) {
    Outcome outcome;
    const Backend *backend = self->driver->library.backend;
    int release = driver_is_to_be_released(self->driver);
    Py_BEGIN_ALLOW_THREADS
    outcome = code_unload(&self->driver->library, &self->code, release);
    Py_END_ALLOW_THREADS
    if (outcome.call == NULL || outcome.code == backend->already_deinitialized) return;
    raise_binary_error(self, outcome, "unloading");
    PyErr_WriteUnraisable(self->name);
}

static void binary_dealloc(PyObject *object) {
    BinaryObject *self = (BinaryObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *error_type, *error, *traceback; /* an error may be on its way past this object */
    PyErr_Fetch(&error_type, &error, &traceback);
    unload_code(self);
    PyErr_Restore(error_type, error, traceback);
    pthread_mutex_destroy(&self->code.preparing);
    Py_XDECREF(self->image);
    Py_DECREF(self->name);
    Py_DECREF(self->driver);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *binary_prepare(PyObject *object, PyObject *value) {
    BinaryObject *self = (BinaryObject *)object;
    const DriverLibrary *library = &self->driver->library;
    KernelFacts facts = {0};
    Outcome outcome = SUCCEEDED;
    int device;
    if (read_device(value, library->device_count, &device) < 0) return NULL;
    if (check_not_forked(self->driver) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (!code_is_ready(&self->code, device)) outcome = code_prepare(&self->driver->library, &self->code, device);
    if (outcome.call == NULL) outcome = library->backend->facts(library, &self->code, device, &facts);
    Py_END_ALLOW_THREADS
    if (outcome.call != NULL) {
        char doing[64];
        snprintf(doing, sizeof doing, "preparing device %d", device);
        raise_binary_error(self, outcome, doing);
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
    {"name", T_OBJECT_EX, offsetof(BinaryObject, name), READONLY, "the kernel's name in its image"},
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
