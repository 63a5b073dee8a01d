/* The type TensorMap: where the tiles of a tensor lie, as the copy engine of sm_90 takes it. */
#include "tensor_map.h"

#include <stdio.h>
#include <string.h>
#include <structmember.h>

/* Driver.tensor_map(address, dtype, sizes, strides, box, swizzle) */
enum { ADDRESS, DTYPE, SIZES, STRIDES, BOX, SWIZZLE, ARGUMENTS };

/* CU_TENSOR_MAP_DATA_TYPE_* of the dtypes that kernels are built for. */
static const struct {
    const char *name;
    int type;
    unsigned bytes;
} DTYPES[] = {{"bf16", 9, 2}, {"fp16", 6, 2}, {"fp32", 7, 4}};

/* Objects are 16-byte aligned, a map must be 64-byte aligned. */
void *tensor_map_bytes(TensorMapObject *self) {
    uintptr_t address = (uintptr_t)self->storage;
    return (void *)((address + TENSOR_MAP_ALIGNMENT - 1) & ~(uintptr_t)(TENSOR_MAP_ALIGNMENT - 1));
}

/* Reads a tuple of `rank` integers, or of any number up to the largest rank where `rank` is 0. Returns the number, or
 * -1 with an error set. */
static int read_tuple(PyObject *value, const char *what, int rank, long long *numbers) {
    if (!PyTuple_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of ints", what);
        return -1;
    }
    Py_ssize_t count = PyTuple_Size(value);
    if (count < 1 || count > TENSOR_MAP_MAX_RANK || (rank > 0 && count != rank)) {
        PyErr_Format(PyExc_ValueError, "%s has %zd numbers, not as many as sizes, of which there are 1 to %d", what,
                     count, TENSOR_MAP_MAX_RANK);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(value, i);
        if (!PyLong_Check(item)) {
            PyErr_Format(PyExc_TypeError, "%s must be a tuple of ints", what);
            return -1;
        }
        numbers[i] = PyLong_AsLongLong(item);
        if (numbers[i] == -1 && PyErr_Occurred()) return -1;
        if (numbers[i] < 0) {
            PyErr_Format(PyExc_ValueError, "%s: %R is negative", what, item);
            return -1;
        }
    }
    return (int)count;
}

static int read_dtype(PyObject *value, TensorMapRequest *request, unsigned *bytes) {
    for (size_t i = 0; i < sizeof DTYPES / sizeof DTYPES[0]; i++) {
        if (!PyUnicode_Check(value) || PyUnicode_CompareWithASCIIString(value, DTYPES[i].name) != 0) continue;
        request->type = DTYPES[i].type;
        *bytes = DTYPES[i].bytes;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "dtype must be \"bf16\", \"fp16\" or \"fp32\", not %R", value);
    return -1;
}

/* The driver counts dimensions from the innermost, strides in bytes and not the innermost. */
static int read_request(PyObject *const *args, TensorMapRequest *request, TensorMapObject *map) {
    long long sizes[TENSOR_MAP_MAX_RANK], strides[TENSOR_MAP_MAX_RANK], box[TENSOR_MAP_MAX_RANK];
    unsigned bytes;
    unsigned long long address = PyLong_AsUnsignedLongLong(args[ADDRESS]);
    if (address == UINT64_MAX && PyErr_Occurred()) return -1;
    if (read_dtype(args[DTYPE], request, &bytes) < 0) return -1;
    int rank = read_tuple(args[SIZES], "sizes", 0, sizes);
    if (rank < 0 || read_tuple(args[STRIDES], "strides", rank, strides) < 0) return -1;
    if (read_tuple(args[BOX], "box", rank, box) < 0) return -1;
    if (strides[rank - 1] != 1) {
        PyErr_Format(PyExc_ValueError, "the last of strides must be 1, not %lld", strides[rank - 1]);
        return -1;
    }
    long swizzle = PyLong_AsLong(args[SWIZZLE]);
    if (swizzle == -1 && PyErr_Occurred()) return -1;
    request->address = (void *)(uintptr_t)address;
    request->rank = (unsigned)rank;
    request->swizzle = (int)swizzle;
    map->rank = rank;
    for (int i = 0; i < rank; i++) {
        int inner = rank - 1 - i;
        if (sizes[i] > INT32_MAX || box[i] > UINT32_MAX || strides[i] > INT64_MAX / bytes) {
            PyErr_Format(PyExc_ValueError, "dimension %d: size %lld, stride %lld or box %lld is too large", i, sizes[i],
                         strides[i], box[i]);
            return -1;
        }
        request->sizes[inner] = (uint64_t)sizes[i];
        request->box[inner] = (uint32_t)box[i];
        if (inner > 0) request->strides[inner - 1] = (uint64_t)strides[i] * bytes;
        map->sizes[i] = (int32_t)sizes[i];
        map->strides[i] = strides[i];
    }
    return 0;
}

PyObject *tensor_map_new(PyTypeObject *type, DriverObject *driver, PyObject *const *args, Py_ssize_t count) {
    if (count != ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "tensor_map() takes %d arguments, not %zd", ARGUMENTS, count);
        return NULL;
    }
    const Backend *backend = driver->library.backend;
    if (backend->encode == NULL) {
        PyErr_Format(PyExc_ValueError, "the %s driver has no tensor maps", backend->name);
        return NULL;
    }
    TensorMapObject *self = (TensorMapObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    TensorMapRequest request = {0};
    if (read_request(args, &request, self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    Outcome outcome = backend->encode(&driver->library, &request, tensor_map_bytes(self));
    if (outcome.call != NULL) {
        char doing[256];
        snprintf(doing, sizeof doing,
                 "encoding a tensor map of %d dimensions at %p (rows of %llu elements, boxes of %u, swizzle %d)",
                 self->rank, request.address, (unsigned long long)request.sizes[0], request.box[0], request.swizzle);
        raise_driver_error(driver, outcome, doing);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void tensor_map_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMemberDef tensor_map_members[] = {
    {"rank", T_INT, offsetof(TensorMapObject, rank), READONLY, "the number of dimensions"},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(tensor_map_doc, "Where the tiles of a tensor lie; Driver.tensor_map makes them. Holds no memory.");

static PyType_Slot tensor_map_slots[] = {
    {Py_tp_doc, (void *)tensor_map_doc},
    {Py_tp_dealloc, tensor_map_dealloc},
    {Py_tp_members, tensor_map_members},
    {0, NULL},
};

PyType_Spec tensor_map_type_spec = {
    .name = "liger_aot._launch.TensorMap",
    .basicsize = sizeof(TensorMapObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = tensor_map_slots,
};
