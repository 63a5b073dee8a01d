/* The type TensorMap: what Driver.tensor_map makes and a launch passes on by value. */
#ifndef LIGER_AOT_TENSOR_MAP_H
#define LIGER_AOT_TENSOR_MAP_H

#include "module.h"

#include <stdint.h>

#pragma GCC visibility push(hidden)

#define TENSOR_MAP_ALIGNMENT 64

/* Sizes and strides, in elements, go to a kernel beside the map: Triton gives it a parameter for each. */
typedef struct {
    PyObject_HEAD
    int rank;
    int32_t sizes[TENSOR_MAP_MAX_RANK];
    int64_t strides[TENSOR_MAP_MAX_RANK];
    unsigned char storage[TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT];
} TensorMapObject;

/* The encoded map, aligned as the driver wants it. */
void *tensor_map_bytes(TensorMapObject *self);

/* Encodes a map; the arguments are those of Driver.tensor_map. A new reference, or NULL with an error set. */
PyObject *tensor_map_new(PyTypeObject *type, DriverObject *driver, PyObject *const *args, Py_ssize_t count);

#pragma GCC visibility pop
#endif
