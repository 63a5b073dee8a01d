/* The parts of the extension module `liger_aot._launch`: its state, its types and what they share. */
#ifndef LIGER_AOT_MODULE_H
#define LIGER_AOT_MODULE_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include "driver.h"

#pragma GCC visibility push(hidden)

/* Reference counts go through the stable ABI's functions: what the headers inline differs from Python to Python, and the
 * module's bytes must not. For the same reason no format here has a "#", for which PY_SSIZE_T_CLEAN would be needed. */
#undef Py_INCREF
#undef Py_DECREF
#undef Py_XDECREF
#undef Py_RETURN_NONE
#undef Py_RETURN_TRUE
#undef Py_RETURN_FALSE
#define Py_INCREF(object) Py_IncRef((PyObject *)(object))
#define Py_DECREF(object) Py_DecRef((PyObject *)(object))
#define Py_XDECREF(object) Py_DecRef((PyObject *)(object)) /* which takes NULL, too */
#define Py_RETURN_NONE return Py_IncRef(Py_None), Py_None
#define Py_RETURN_TRUE return Py_IncRef(Py_True), Py_True
#define Py_RETURN_FALSE return Py_IncRef(Py_False), Py_False

/* The tensor types whose DLPack exchange API is known: torch.Tensor and torch.nn.Parameter. */
#define TENSOR_TYPES 2

struct ExchangeApi;

typedef struct {
    PyObject *driver_type;
    PyObject *kernel_type;
    PyObject *tensor_map_type;
    PyObject *binary_type;
    PyObject *triton_launcher_type;
    PyObject *tensor_types[TENSOR_TYPES]; /* both NULL until torch is imported */
    const struct ExchangeApi *tensor_apis[TENSOR_TYPES];
    PyObject *is_neg, *requires_grad, *data_ptr, *dtype; /* names of a tensor's attributes */
    PyObject *base, *shape, *strides, *padding, *tf32;   /* of a tensor descriptor's */
    PyObject *calls;                                     /* and of a chain of Triton's hooks */
} ModuleState;

typedef struct {
    PyObject_HEAD
    DriverLibrary library;
    PyObject *backend_name;
    PyObject *library_name;
} DriverObject;

extern PyType_Spec driver_type_spec;
extern PyType_Spec kernel_type_spec;
extern PyType_Spec tensor_map_type_spec;
extern PyType_Spec binary_type_spec;
extern PyType_Spec triton_launcher_type_spec;

/* Loads a kernel; the arguments are those of Driver.load. A new reference, or NULL with an error set. */
PyObject *kernel_new(PyTypeObject *type, PyObject *map_type, DriverObject *driver, PyObject *args, PyObject *keywords);

/* Make what Driver.binary and Driver.triton_launcher return; the arguments are theirs. As kernel_new. */
PyObject *binary_new(PyTypeObject *type, DriverObject *driver, PyObject *args, PyObject *keywords);
PyObject *triton_launcher_new(PyTypeObject *type, ModuleState *state, DriverObject *driver, PyObject *args,
                              PyObject *keywords);

/* Sets liger_aot.errors.DriverError for a failed outcome; `doing` says what it was part of. */
void raise_driver_error(const DriverObject *driver, Outcome outcome, const char *doing);

/* Returns 0, or -1 with liger_aot.errors.ForkedProcess set where the driver belongs to the process this one was forked
 * from. */
int check_not_forked(const DriverObject *driver);

/* Whether what the driver holds is to be given back to it: not while the interpreter shuts down, when the driver may be
 * gone, nor in a fork of the process whose driver it is. */
int driver_is_to_be_released(const DriverObject *driver);

/* Reads a device's index; in arguments.c. Returns 0, or -1 with an error set. */
int read_device(PyObject *value, int device_count, int *device);

/* Where a plain tensor's memory lies, and whether that is a GPU's: 1, 0 where it is no such tensor, -1 with an error set. */
int tensor_address(ModuleState *state, PyObject *tensor, uint64_t *address, int *on_gpu);

/* Driver.call_key(places, flags, defaults, dtype_class, args, kwargs). */
PyObject *call_key(ModuleState *state, PyObject *const *arguments, Py_ssize_t given);

/* The module's tensor_rows(tensor), traits(tensors, settings, known) and layouts(tensors). */
PyObject *tensor_rows(PyObject *module, PyObject *tensor);
PyObject *traits(PyObject *module, PyObject *const *arguments, Py_ssize_t given);
PyObject *layouts(PyObject *module, PyObject *tensors);

#pragma GCC visibility pop
#endif
