/* Turning Python values into the parameters of a kernel launch. Only `int`, `float`, None and TensorMap are taken: a value of
 * another type is more likely a mistake (a tensor, a numpy scalar of another width) than an argument. */
#include "arguments.h"

#include "tensor_map.h"

#include <string.h>

/* ---- Kernel arguments ---- */

int check_signature(const char *signature) {
    size_t length = strlen(signature), known = strspn(signature, "pilf12345");
    if (known != length) {
        PyErr_Format(PyExc_ValueError,
                     "signature \"%s\": character %zu is none of p (pointer), i (int32), l (int64), f (float32), 1 to 5 (tensor map)",
                     signature, known + 1);
        return -1;
    }
    if (length > MAX_ARGUMENTS) {
        PyErr_Format(PyExc_ValueError, "a signature of %zu arguments is more than the %d supported", length,
                     MAX_ARGUMENTS);
        return -1;
    }
    size_t parameters = 0;
    for (const char *letter = signature; *letter != 0; letter++) parameters += 1 + 2 * (size_t)map_rank(*letter);
    if (parameters > MAX_PARAMETERS) {
        PyErr_Format(PyExc_ValueError, "a signature of %zu parameters is more than the %d supported", parameters,
                     MAX_PARAMETERS);
        return -1;
    }
    return 0;
}

static int pack_pointer(PyObject *value, Slot *slot) {
    if (value == Py_None) {
        slot->pointer = 0;
        return 0;
    }
    if (!PyLong_Check(value)) return -1;
    slot->pointer = PyLong_AsUnsignedLongLong(value);
    return slot->pointer == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int pack_int64(PyObject *value, Slot *slot) {
    if (!PyLong_Check(value)) return -1;
    slot->int64 = PyLong_AsLongLong(value);
    return slot->int64 == -1 && PyErr_Occurred() ? -1 : 0;
}

static int pack_int32(PyObject *value, Slot *slot) {
    if (pack_int64(value, slot) < 0 || slot->int64 != (int32_t)slot->int64) return -1;
    slot->int32 = (int32_t)slot->int64;
    return 0;
}

/* Rounds to the nearest float32, so that what lies beyond its range becomes an infinity. */
static int pack_float32(PyObject *value, Slot *slot) {
    if (!PyFloat_Check(value) && !PyLong_Check(value)) return -1;
    double wide = PyFloat_AsDouble(value);
    if (wide == -1.0 && PyErr_Occurred()) return -1;
    slot->float32 = (float)wide;
    return 0;
}

static int pack_map(PyObject *map_type, int rank, PyObject *value, void ***end) {
    TensorMapObject *map = (TensorMapObject *)value;
    if ((PyObject *)Py_TYPE(value) != map_type || map->rank != rank) return -1;
    *(*end)++ = tensor_map_bytes(map);
    for (int i = 0; i < rank; i++) *(*end)++ = &map->sizes[i];
    for (int i = 0; i < rank; i++) *(*end)++ = &map->strides[i];
    return 0;
}

int pack_argument(PyObject *map_type, char letter, PyObject *value, Slot *slot, void ***end) {
    if (map_rank(letter) > 0) return pack_map(map_type, map_rank(letter), value, end);
    *(*end)++ = slot;
    switch (letter) {
        case ARGUMENT_POINTER: return pack_pointer(value, slot);
        case ARGUMENT_INT32: return pack_int32(value, slot);
        case ARGUMENT_INT64: return pack_int64(value, slot);
        default: return pack_float32(value, slot);
    }
}

/* A value of the right type was refused for its size. */
static int is_out_of_range(char letter, PyObject *value) {
    return (PyLong_Check(value) && map_rank(letter) == 0) || (letter == ARGUMENT_FLOAT32 && PyFloat_Check(value));
}

static const char *expected(char letter) {
    switch (letter) {
        case ARGUMENT_POINTER: return "an int (an address) or None";
        case ARGUMENT_INT32: return "an int (int32)";
        case ARGUMENT_INT64: return "an int (int64)";
        case '1': return "a TensorMap of 1 dimension";
        case '2': return "a TensorMap of 2 dimensions";
        case '3': return "a TensorMap of 3 dimensions";
        case '4': return "a TensorMap of 4 dimensions";
        case '5': return "a TensorMap of 5 dimensions";
        default: return "a float or an int (float32)";
    }
}

/* "int", "Tensor": a new reference to the name of the value's type, which the limited API has no shorter way to. */
static PyObject *type_name(PyObject *value) { return PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__name__"); }

void argument_error(PyObject *kernel_name, const char *signature, int index, PyObject *value) {
    char letter = signature[index];
    int count = (int)strlen(signature);
    PyErr_Clear(); /* what the conversion said: it knows no position */
    if (is_out_of_range(letter, value)) {
        PyErr_Format(PyExc_OverflowError, "kernel %U, argument %d of %d: %R is out of range for %s", kernel_name,
                     index + 1, count, value, expected(letter));
        return;
    }
    PyObject *given = type_name(value);
    if (given == NULL) return;
    PyErr_Format(PyExc_TypeError, "kernel %U, argument %d of %d must be %s, not %U", kernel_name, index + 1, count,
                 expected(letter), given);
    Py_DECREF(given);
}

/* ---- Device, stream and grid ---- */

static int require_int(PyObject *value, const char *what) {
    if (PyLong_Check(value)) return 0;
    PyObject *given = type_name(value);
    if (given == NULL) return -1;
    PyErr_Format(PyExc_TypeError, "%s must be an int, not %U", what, given);
    Py_DECREF(given);
    return -1;
}

int read_device(PyObject *value, int device_count, int *device) {
    if (require_int(value, "device") < 0) return -1;
    int overflow;
    long index = PyLong_AsLongAndOverflow(value, &overflow);
    if (overflow != 0 || index < 0 || index >= device_count) {
        PyErr_Format(PyExc_ValueError, "device %R: this process sees %d, counted from 0", value, device_count);
        return -1;
    }
    *device = (int)index;
    return 0;
}

int read_stream(PyObject *value, void **stream) {
    if (require_int(value, "stream (an address, 0 for the default stream)") < 0) return -1;
    unsigned long long address = PyLong_AsUnsignedLongLong(value);
    if (address == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear(); /* it names no argument */
        PyErr_Format(PyExc_OverflowError, "stream is %R, which is no address", value);
        return -1;
    }
    *stream = (void *)(uintptr_t)address;
    return 0;
}

int read_grid(PyObject *const *values, const unsigned limits[3], unsigned grid[3]) {
    static const char *const names[] = {"grid_x", "grid_y", "grid_z"};
    for (int axis = 0; axis < 3; axis++) {
        if (require_int(values[axis], names[axis]) < 0) return -1;
        int overflow;
        long long size = PyLong_AsLongLongAndOverflow(values[axis], &overflow);
        if (overflow != 0 || size < 0 || size > (long long)limits[axis]) {
            PyErr_Format(PyExc_ValueError, "%s is %R, outside 0 to %u", names[axis], values[axis], limits[axis]);
            return -1;
        }
        grid[axis] = (unsigned)size;
    }
    return 0;
}
