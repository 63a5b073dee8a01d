/* The type Driver: an opened driver library, and the errors that come from one. */
#include "tensor_map.h"

#include <stdio.h>
#include <string.h>
#include <structmember.h>

/* ---- Errors ---- */

/* Imported when needed: importing liger_aot must not depend on the order of its modules. A new reference. */
static PyObject *error_class(const char *name) {
    PyObject *errors = PyImport_ImportModule("liger_aot.errors");
    if (errors == NULL) return NULL;
    PyObject *class = PyObject_GetAttrString(errors, name);
    Py_DECREF(errors);
    return class;
}

static void raise_not_found(const char *backend, const char *reason) {
    PyObject *class = error_class("DriverNotFound");
    if (class == NULL) return;
    PyErr_Format(class, "cannot use the %s driver library: %s", backend, reason);
    Py_DECREF(class);
}

void raise_driver_error(const DriverObject *driver, Outcome outcome, const char *doing) {
    if (outcome.call == OUT_OF_MEMORY) {
        PyErr_NoMemory();
        return;
    }
    const char *name, *text;
    driver->library.backend->describe(&driver->library, outcome.code, &name, &text);

    PyObject *class = error_class("DriverError");
    PyObject *message = NULL, *fields = NULL, *error = NULL;
    if (class == NULL) goto done;
    message = Py_BuildValue("(N)", PyUnicode_FromFormat("%s failed with %d (%s: %s) while %s", outcome.call,
                                                        outcome.code, name, text, doing));
    if (message == NULL) goto done;
    fields = Py_BuildValue("{s:s,s:i,s:s}", "call", outcome.call, "code", outcome.code, "name", name);
    if (fields == NULL) goto done;
    error = PyObject_Call(class, message, fields);
    if (error != NULL) PyErr_SetObject(class, error);
done:
    Py_XDECREF(error);
    Py_XDECREF(fields);
    Py_XDECREF(message);
    Py_XDECREF(class);
}

int check_not_forked(const DriverObject *driver) {
    if (!driver_is_inherited(&driver->library)) return 0;
    PyObject *class = error_class("ForkedProcess");
    if (class == NULL) return -1;
    PyErr_Format(class,
                 "this process was forked from one that had opened the %s driver, which works in that one alone: use "
                 "multiprocessing's start method \"spawn\" or \"forkserver\"",
                 driver->library.backend->name);
    Py_DECREF(class);
    return -1;
}

static int interpreter_is_finalising(void) {
    PyObject *function = PySys_GetObject("is_finalizing"); /* borrowed; NULL once sys itself has been cleared */
    if (function == NULL) return 1;
    PyObject *answer = PyObject_CallNoArgs(function);
    int finalising = answer == NULL || PyObject_IsTrue(answer) != 0;
    PyErr_Clear();
    Py_XDECREF(answer);
    return finalising;
}

int driver_is_to_be_released(const DriverObject *driver) {
    return !driver_is_inherited(&driver->library) && !interpreter_is_finalising();
}

/* ---- Making and freeing ---- */

static const Backend *find_backend(const char *name) {
    if (strcmp(name, "cuda") == 0) return &cuda_backend;
    if (strcmp(name, "hip") == 0) return &hip_backend;
    PyErr_Format(PyExc_ValueError, "backend must be \"cuda\" or \"hip\", not \"%s\"", name);
    return NULL;
}

/* Opening maps a large library and initialising it can take a second: other threads run meanwhile. */
static int open_and_start(DriverObject *self, const Backend *backend, const char *path) {
    char reason[512], doing[64];
    int opened;
    Outcome outcome = SUCCEEDED;
    Py_BEGIN_ALLOW_THREADS
    opened = driver_open(&self->library, backend, path, reason, sizeof reason);
    if (opened == 0) outcome = driver_start(&self->library);
    Py_END_ALLOW_THREADS
    if (opened < 0) {
        raise_not_found(backend->name, reason);
        return -1;
    }
    if (outcome.call == NULL) return 0;
    snprintf(doing, sizeof doing, "starting the %s driver", backend->name);
    raise_driver_error(self, outcome, doing);
    return -1;
}

static PyObject *driver_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"backend", "library", NULL};
    const char *backend_name, *path;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "ss:Driver", names, &backend_name, &path)) return NULL;
    const Backend *backend = find_backend(backend_name);
    if (backend == NULL) return NULL;

    DriverObject *self = (DriverObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    pthread_mutex_init(&self->library.retaining, NULL); /* default attributes: cannot fail on Linux */
    self->backend_name = PyUnicode_FromString(backend_name);
    self->library_name = PyUnicode_FromString(path);
    if (self->backend_name == NULL || self->library_name == NULL || open_and_start(self, backend, path) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void driver_dealloc(PyObject *object) {
    DriverObject *self = (DriverObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *error_type, *error, *traceback; /* an error may be on its way past this object */
    PyErr_Fetch(&error_type, &error, &traceback);
    int release = driver_is_to_be_released(self);
    Py_BEGIN_ALLOW_THREADS
    driver_close(&self->library, release);
    Py_END_ALLOW_THREADS
    PyErr_Restore(error_type, error, traceback);
    pthread_mutex_destroy(&self->library.retaining);
    Py_XDECREF(self->backend_name);
    Py_XDECREF(self->library_name);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* ---- Methods ---- */

static PyObject *driver_load(PyObject *self, PyObject *args, PyObject *keywords) {
    ModuleState *state = PyType_GetModuleState(Py_TYPE(self)); /* the type cannot be subclassed: it is ours */
    if (state == NULL) return NULL;
    return kernel_new((PyTypeObject *)state->kernel_type, state->tensor_map_type, (DriverObject *)self, args, keywords);
}

static PyObject *driver_tensor_map(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    ModuleState *state = PyType_GetModuleState(Py_TYPE(self));
    if (state == NULL) return NULL;
    return tensor_map_new((PyTypeObject *)state->tensor_map_type, (DriverObject *)self, args, count);
}

static PyObject *driver_binary(PyObject *self, PyObject *args, PyObject *keywords) {
    ModuleState *state = PyType_GetModuleState(Py_TYPE(self));
    if (state == NULL) return NULL;
    return binary_new((PyTypeObject *)state->binary_type, (DriverObject *)self, args, keywords);
}

static PyObject *driver_triton_launcher(PyObject *self, PyObject *args, PyObject *keywords) {
    ModuleState *state = PyType_GetModuleState(Py_TYPE(self));
    if (state == NULL) return NULL;
    return triton_launcher_new((PyTypeObject *)state->triton_launcher_type, state, (DriverObject *)self, args, keywords);
}

static PyObject *driver_call_key(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    ModuleState *state = PyType_GetModuleState(Py_TYPE(self));
    return state == NULL ? NULL : call_key(state, args, count);
}

PyDoc_STRVAR(driver_doc,
             "Driver(backend, library)\n--\n\n"
             "An opened GPU driver: backend \"cuda\" or \"hip\", library the name or path to open.");
PyDoc_STRVAR(load_doc,
             "load($self, image, name, /, *, threads, shared, signature, cooperative=False, pdl=False)\n--\n\n"
             "The kernel `name` of a compiled image, as a Kernel.");

PyDoc_STRVAR(tensor_map_doc,
             "tensor_map($self, address, dtype, sizes, strides, box, swizzle, /)\n--\n\n"
             "Where the tiles of a tensor lie, as a TensorMap.");

PyDoc_STRVAR(binary_doc,
             "binary($self, image, name, /, *, shared)\n--\n\n"
             "The kernel `name` of a compiled image, as a Binary.");

PyDoc_STRVAR(triton_launcher_doc,
             "triton_launcher($self, name, program, /, device, threads, shared, arguments, maps, cluster=1,\n"
             "                cooperative=False, pdl=False, scratch=None)\n--\n\n"
             "What launches a kernel for Triton, as a TritonLauncher.");

PyDoc_STRVAR(call_key_doc,
             "call_key($self, places, flags, defaults, dtype_class, args, kwargs, /)\n--\n\n"
             "(key, values by parameter) of a call of one of Triton's functions; None where only Triton can say.");

static PyMethodDef driver_methods[] = {
    {"call_key", (PyCFunction)(void (*)(void))driver_call_key, METH_FASTCALL, call_key_doc},
    {"binary", (PyCFunction)(void (*)(void))driver_binary, METH_VARARGS | METH_KEYWORDS, binary_doc},
    {"triton_launcher", (PyCFunction)(void (*)(void))driver_triton_launcher, METH_VARARGS | METH_KEYWORDS,
     triton_launcher_doc},
    {"load", (PyCFunction)(void (*)(void))driver_load, METH_VARARGS | METH_KEYWORDS, load_doc},
    {"tensor_map", (PyCFunction)(void (*)(void))driver_tensor_map, METH_FASTCALL, tensor_map_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef driver_members[] = {
    {"backend", T_OBJECT_EX, offsetof(DriverObject, backend_name), READONLY, "\"cuda\" or \"hip\""},
    {"library", T_OBJECT_EX, offsetof(DriverObject, library_name), READONLY, "the library as it was asked for"},
    {"version", T_INT, offsetof(DriverObject, library.version), READONLY, "the driver's version number"},
    {"device_count", T_INT, offsetof(DriverObject, library.device_count), READONLY, "devices this process sees"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot driver_slots[] = {
    {Py_tp_doc, (void *)driver_doc},
    {Py_tp_new, driver_new},
    {Py_tp_dealloc, driver_dealloc},
    {Py_tp_methods, driver_methods},
    {Py_tp_members, driver_members},
    {0, NULL},
};

PyType_Spec driver_type_spec = {
    .name = "liger_aot._launch.Driver",
    .basicsize = sizeof(DriverObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = driver_slots,
};
