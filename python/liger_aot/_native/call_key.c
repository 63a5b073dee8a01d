/* What Triton's choice of a kernel depends on, of the arguments of a call: the same key, the same kernel.
 *
 * Triton binds a call's arguments to parameters, finds each one's type and whether it is 1 or divisible by 16, and makes
 * a text of all of it to look the kernel up by. This tells at least as many calls apart, and answers for the kinds of
 * arguments that most calls have; for all others it has no key, and Triton is to be asked.
 *
 * A key has for each parameter a letter and what the letter says follows, so that no two calls have the same by chance:
 *   N            None
 *   T F          a bool
 *   1 j J u      an int: 1; of 32, 64 and 64 unsigned bits. Divisible by 16: in upper case, which are k K U
 *   f            a float
 *   t a          a tensor: its dtype follows; its address is divisible by 16 or not (a)
 * and for a constant its value: N T F, i an int, d a float, s a text, p one of Triton's dtypes.
 * Options of the call follow, each behind an o and its number. */
#include "module.h"

#include <stdint.h>
#include <string.h>

enum { LONGEST_KEY = 1024, LONGEST_TEXT = 128 };
enum { IS_CONSTANT = 1, HAS_DEFAULT = 2 }; /* what `flags` says of a parameter */

typedef struct {
    char bytes[LONGEST_KEY];
    size_t length;
} Key;

/* These return 1, 0 where there is no key, -1 with an error set. */
static int add(Key *key, char letter, const void *data, size_t length) {
    if (key->length + 1 + length > LONGEST_KEY) return 0;
    key->bytes[key->length++] = letter;
    if (length > 0) memcpy(key->bytes + key->length, data, length);
    key->length += length;
    return 1;
}

static int add_number(Key *key, PyObject *value) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (number == -1 && overflow == 0 && PyErr_Occurred()) return -1;
    if (overflow != 0) {
        if (overflow < 0) return 0;
        unsigned long long large = PyLong_AsUnsignedLongLong(value);
        if (large == (unsigned long long)-1 && PyErr_Occurred()) return PyErr_Clear(), 0;
        return add(key, large % 16 == 0 ? 'U' : 'u', NULL, 0);
    }
    if (number == 1) return add(key, '1', NULL, 0);
    int is_short = number >= INT32_MIN && number <= INT32_MAX;
    if (number % 16 == 0) return add(key, is_short ? 'k' : 'K', NULL, 0);
    return add(key, is_short ? 'j' : 'J', NULL, 0);
}

/* Dtypes live as long as the process. */
static int add_tensor(ModuleState *state, Key *key, PyObject *value) {
    uint64_t address = 0;
    int on_gpu = 0, known = tensor_address(state, value, &address, &on_gpu);
    if (known <= 0) return known;
    PyObject *dtype = PyObject_GetAttr(value, state->dtype);
    if (dtype == NULL) return -1;
    Py_DECREF(dtype);
    return add(key, address % 16 == 0 ? 't' : 'a', &dtype, sizeof dtype);
}

static int add_value(ModuleState *state, Key *key, PyObject *value) {
    if (value == Py_None) return add(key, 'N', NULL, 0);
    if (PyBool_Check(value)) return add(key, value == Py_True ? 'T' : 'F', NULL, 0);
    if (PyLong_CheckExact(value)) return add_number(key, value);
    if (PyFloat_CheckExact(value)) return add(key, 'f', NULL, 0);
    return add_tensor(state, key, value);
}

static int add_text(Key *key, PyObject *value) {
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == NULL) return PyErr_Clear(), 0;
    if (length > LONGEST_TEXT) return 0;
    char size = (char)(unsigned char)length;
    return add(key, 's', &size, 1) == 1 ? add(key, ':', text, (size_t)length) : 0;
}

static int add_constant(Key *key, PyObject *value, PyObject *dtype_class) {
    if (value == Py_None) return add(key, 'N', NULL, 0);
    if (PyBool_Check(value)) return add(key, value == Py_True ? 'T' : 'F', NULL, 0);
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (number == -1 && overflow == 0 && PyErr_Occurred()) return -1;
        return overflow != 0 ? 0 : add(key, 'i', &number, sizeof number);
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        return add(key, 'd', &number, sizeof number);
    }
    if (PyUnicode_CheckExact(value)) return add_text(key, value);
    if ((PyObject *)Py_TYPE(value) == dtype_class) return add(key, 'p', &value, sizeof value);
    return 0;
}

/* What the keyword arguments are: of parameters into `values`, which has none of them twice; options into the key. */
static int read_keywords(Key *options, PyObject *names, PyObject *keywords, PyObject **values, Py_ssize_t count) {
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(keywords, &at, &name, &value)) {
        PyObject *place = PyDict_GetItemWithError(names, name); /* borrowed */
        if (place == NULL) return PyErr_Occurred() ? -1 : 0;
        long number = PyLong_AsLong(place);
        if (number == -1 && PyErr_Occurred()) return -1;
        if (number < count) {
            if (values[number] != NULL) return 0;
            values[number] = value;
        } else {
            unsigned char option = (unsigned char)(number - count);
            int added = add(options, 'o', &option, 1);
            if (added == 1) added = add_constant(options, value, NULL);
            if (added <= 0) return added;
        }
    }
    return 1;
}

static int make_key(ModuleState *state, Key *key, const char *flags, PyObject *defaults, PyObject *dtype_class,
                    PyObject **values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        if (values[i] == NULL && flags[i] & HAS_DEFAULT) values[i] = PyTuple_GetItem(defaults, i);
        if (values[i] == NULL) return 0;
        int added = flags[i] & IS_CONSTANT ? add_constant(key, values[i], dtype_class) : add_value(state, key, values[i]);
        if (added <= 0) return added;
    }
    return 1;
}

static PyObject *as_result(const Key *key, PyObject *const *values, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count), *bytes = NULL, *result = NULL;
    if (tuple == NULL) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_INCREF(values[i]);
        PyTuple_SetItem(tuple, i, values[i]);
    }
    bytes = PyBytes_FromStringAndSize(key->bytes, (Py_ssize_t)key->length);
    if (bytes != NULL) result = PyTuple_Pack(2, bytes, tuple);
    Py_XDECREF(bytes);
    Py_DECREF(tuple);
    return result;
}

PyObject *call_key(ModuleState *state, PyObject *const *arguments, Py_ssize_t given) {
    enum { NAMES, FLAGS, DEFAULTS, DTYPE_CLASS, POSITIONAL, KEYWORDS, COUNT, MOST_PARAMETERS = 256 };
    PyObject *values[MOST_PARAMETERS] = {NULL};
    char *flags;
    Py_ssize_t count;
    if (given != COUNT || !PyDict_Check(arguments[NAMES]) || !PyBytes_Check(arguments[FLAGS]) ||
        !PyTuple_Check(arguments[DEFAULTS]) || !PyTuple_Check(arguments[POSITIONAL]) || !PyDict_Check(arguments[KEYWORDS]))
        return PyErr_Format(PyExc_TypeError, "call_key takes a dict, bytes, a tuple, a type, a tuple and a dict");
    if (PyBytes_AsStringAndSize(arguments[FLAGS], &flags, &count) < 0) return NULL;
    if (count > MOST_PARAMETERS || PyTuple_Size(arguments[DEFAULTS]) != count)
        return PyErr_Format(PyExc_ValueError, "%zd parameters with %zd defaults", count, PyTuple_Size(arguments[DEFAULTS]));
    Py_ssize_t positional = PyTuple_Size(arguments[POSITIONAL]);
    if (positional > count) Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < positional; i++) values[i] = PyTuple_GetItem(arguments[POSITIONAL], i);
    Key key, options;
    key.length = options.length = 0;
    int made = read_keywords(&options, arguments[NAMES], arguments[KEYWORDS], values, count);
    if (made == 1)
        made = make_key(state, &key, flags, arguments[DEFAULTS], arguments[DTYPE_CLASS], values, count);
    if (made == 1 && options.length > 0) made = add(&key, ';', options.bytes, options.length);
    if (made < 0) return NULL;
    if (made == 0) Py_RETURN_NONE;
    return as_result(&key, values, count);
}
