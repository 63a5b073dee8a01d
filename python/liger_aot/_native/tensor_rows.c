/* Reading torch tensors, as rows or as they lie, through the C table that DLPack 1.2 defines for it and torch 2.10
 * introduced. It needs no header of torch, and answers in one call what data_ptr(), device, dtype, shape and stride()
 * do in five. */
#include "module.h"

#include <stdint.h>

/* ---- DLPack, major version 1: the part that is read here ---- */

typedef struct {
    int32_t type;
    int32_t index;
} DlDevice;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DlType;

typedef struct {
    void *data;
    DlDevice device;
    int32_t dimensions;
    DlType type;
    int64_t *sizes;
    int64_t *strides; /* in elements */
    uint64_t byte_offset;
} DlTensor;

typedef struct ExchangeApi {
    uint32_t major;
    uint32_t minor;
    const struct ExchangeApi *older; /* the same for an earlier major version, or NULL */
    void *allocate;
    void *export_managed;
    void *import_managed;
    int (*describe)(void *tensor, DlTensor *described); /* may be NULL */
    void *current_stream;
} ExchangeApi;

#define CAPSULE_NAME "dlpack_exchange_api"
#define MAJOR_VERSION 1

/* ---- Finding the table of a tensor type ---- */

/* The table of one type, or NULL without an error: then it has none that is understood here. */
static const ExchangeApi *api_of_type(PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const ExchangeApi *api = capsule != NULL ? PyCapsule_GetPointer(capsule, CAPSULE_NAME) : NULL;
    Py_XDECREF(capsule); /* the table itself lives as long as the process */
    PyErr_Clear();
    while (api != NULL && api->major != MAJOR_VERSION) api = api->older;
    return api != NULL && api->describe != NULL ? api : NULL;
}

/* module.path[0].path[1]...: a new reference, or NULL with an error set. */
static PyObject *attribute_at(PyObject *module, const char *const *path) {
    PyObject *found = module;
    Py_INCREF(found);
    for (; found != NULL && *path != NULL; path++) {
        PyObject *next = PyObject_GetAttrString(found, *path);
        Py_DECREF(found);
        found = next;
    }
    return found;
}

/* Fills the module's cache from torch, if some code has imported that: a tensor cannot come from anywhere else.
 * Leaves the cache empty while torch is not, or not fully, imported. */
static void find_tensor_types(ModuleState *state) {
    static const char *const paths[TENSOR_TYPES][3] = {{"Tensor", NULL}, {"nn", "Parameter", NULL}};
    PyObject *types[TENSOR_TYPES] = {NULL};
    const ExchangeApi *apis[TENSOR_TYPES] = {NULL};
    PyObject *name = PyUnicode_FromString("torch");
    PyObject *torch = name != NULL ? PyImport_GetModule(name) : NULL;
    int found = torch != NULL;
    for (int i = 0; found && i < TENSOR_TYPES; i++) {
        found = (types[i] = attribute_at(torch, paths[i])) != NULL;
        if (found) apis[i] = api_of_type(types[i]);
    }
    PyErr_Clear();
    /* Looking up attributes may have let another thread come first. */
    int keep = found && state->tensor_types[0] == NULL;
    for (int i = 0; i < TENSOR_TYPES; i++) {
        if (keep) {
            state->tensor_types[i] = types[i];
            state->tensor_apis[i] = apis[i];
        } else {
            Py_XDECREF(types[i]);
        }
    }
    Py_XDECREF(torch);
    Py_XDECREF(name);
}

/* Exact types only: a subclass inherits the table but may hold its data elsewhere, or nowhere (a fake tensor). */
static const ExchangeApi *find_api(ModuleState *state, PyObject *tensor) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (state->tensor_types[0] == NULL) find_tensor_types(state);
    for (int i = 0; i < TENSOR_TYPES; i++)
        if (type == state->tensor_types[i]) return state->tensor_apis[i];
    return NULL;
}

/* ---- Rows ---- */

typedef struct {
    int64_t rows;
    int64_t columns;
    int64_t stride;
} Rows;

/* Collapses all dimensions but the last into one of constant stride. Returns 1, or 0 where that cannot be. */
static int collapse(const DlTensor *tensor, Rows *rows) {
    int last = tensor->dimensions - 1;
    if (last < 0) return 0;
    rows->columns = tensor->sizes[last];
    rows->rows = 1;
    for (int i = 0; i < last; i++) rows->rows *= tensor->sizes[i];
    rows->stride = rows->columns;
    if (rows->rows == 0 || rows->columns == 0) return 1; /* no element, so no stride counts */
    if (rows->columns > 1 && tensor->strides[last] != 1) return 0;
    if (rows->rows == 1) return 1;

    int64_t expected = -1; /* the stride that continues the dimensions inside this one */
    for (int i = last - 1; i >= 0; i--) {
        if (tensor->sizes[i] == 1) continue;
        if (expected < 0) rows->stride = tensor->strides[i];
        else if (tensor->strides[i] != expected) return 0;
        expected = tensor->strides[i] * tensor->sizes[i];
    }
    return 1;
}

/* Stores a number in a new tuple, which takes the reference. */
static int put(PyObject *tuple, Py_ssize_t index, PyObject *number) {
    return number == NULL ? -1 : PyTuple_SetItem(tuple, index, number);
}

static PyObject *as_tuple(const DlTensor *tensor, const Rows *rows) {
    PyObject *tuple = PyTuple_New(8);
    if (tuple == NULL) return NULL;
    uint64_t address = (uint64_t)(uintptr_t)tensor->data + tensor->byte_offset;
    if (put(tuple, 0, PyLong_FromUnsignedLongLong(address)) < 0 ||
        put(tuple, 1, PyLong_FromLong(tensor->device.type)) < 0 ||
        put(tuple, 2, PyLong_FromLong(tensor->device.index)) < 0 ||
        put(tuple, 3, PyLong_FromLong(tensor->type.code)) < 0 ||
        put(tuple, 4, PyLong_FromLong(tensor->type.bits)) < 0 ||
        put(tuple, 5, PyLong_FromLongLong(rows->rows)) < 0 ||
        put(tuple, 6, PyLong_FromLongLong(rows->columns)) < 0 ||
        put(tuple, 7, PyLong_FromLongLong(rows->stride)) < 0) {
        Py_DECREF(tuple);
        return NULL;
    }
    return tuple;
}

/* Torch raises for a tensor without plain storage (sparse, meta, inside vmap); a functional wrapper has address 0. */
static int describe(const ExchangeApi *api, PyObject *tensor, DlTensor *described) {
    if (api->describe(tensor, described) == 0) return 1;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_BufferError)) return -1;
    PyErr_Clear();
    return 0;
}

static int has_elements(const DlTensor *tensor) {
    for (int i = 0; i < tensor->dimensions; i++)
        if (tensor->sizes[i] == 0) return 0;
    return 1;
}

/* Whether its memory holds the values' negatives (torch's negative bit), which DLPack does not tell; -1: an error. */
static int is_negated(ModuleState *state, PyObject *tensor) {
    PyObject *answer = PyObject_CallMethodObjArgs(tensor, state->is_neg, NULL);
    if (answer == NULL) return -1;
    Py_DECREF(answer);
    return answer == Py_True;
}

/* Torch negates lazily what is a view of complex numbers' imaginary parts: no row of several has them side by side. */
static int may_be_negated(const DlTensor *tensor) {
    int last = tensor->dimensions - 1;
    return last < 0 || tensor->sizes[last] <= 1 || tensor->strides[last] != 1;
}

/* 1 where a value is a plain tensor whose values are what its memory holds, 0 where not, -1 with an error set. */
static int describe_plain(ModuleState *state, PyObject *value, DlTensor *described) {
    const ExchangeApi *api = find_api(state, value);
    int known = api == NULL ? 0 : describe(api, value, described);
    if (known <= 0) return known;
    if (described->data == NULL && has_elements(described)) return 0;
    int negated = may_be_negated(described) ? is_negated(state, value) : 0;
    return negated < 0 ? -1 : !negated;
}

/* Lazily negated values are what lies in memory, as data_ptr() has it. */
int tensor_address(ModuleState *state, PyObject *tensor, uint64_t *address, int *on_gpu) {
    enum { CUDA = 2, ROCM = 10 };
    DlTensor described;
    const ExchangeApi *api = find_api(state, tensor);
    int known = api == NULL ? 0 : describe(api, tensor, &described);
    if (known <= 0) return known;
    if (described.data == NULL && has_elements(&described)) return 0;
    *address = (uint64_t)(uintptr_t)described.data + described.byte_offset;
    *on_gpu = described.device.type == CUDA || described.device.type == ROCM;
    return 1;
}

PyObject *tensor_rows(PyObject *module, PyObject *tensor) {
    DlTensor described;
    Rows rows;
    int plain = describe_plain(PyModule_GetState(module), tensor, &described);
    if (plain < 0) return NULL;
    if (!plain || described.type.lanes != 1 || !collapse(&described, &rows)) Py_RETURN_NONE;
    return as_tuple(&described, &rows);
}

/* ---- What a call must know of its tensors ---- */

/* What traits() answers: the constants of liger_aot.runtime.layout. */
enum { NEEDS_GRADIENT = 1, OTHER_SETTINGS = 2, INDIRECT = 4 };

/* How many values a tuple has, or -1 with an error set. */
static Py_ssize_t count_of(PyObject *tensors, const char *function) {
    if (PyTuple_Check(tensors)) return PyTuple_Size(tensors);
    PyErr_Format(PyExc_TypeError, "%s takes tuples", function);
    return -1;
}

/* Whether two tuples hold the very same objects. */
static int same_objects(PyObject *a, PyObject *b) {
    Py_ssize_t count = PyTuple_Size(a);
    if (count != PyTuple_Size(b)) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyTuple_GetItem(a, i) != PyTuple_GetItem(b, i)) return 0;
    return 1;
}

PyObject *traits(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    ModuleState *state = PyModule_GetState(module);
    if (given != 1 && given != 3) return PyErr_Format(PyExc_TypeError, "traits takes one tuple or three");
    PyObject *tensors = arguments[0];
    Py_ssize_t count = count_of(tensors, "traits");
    for (Py_ssize_t i = 1; count >= 0 && i < given; i++)
        if (count_of(arguments[i], "traits") < 0) count = -1;
    if (count < 0) return NULL;
    long found = given == 1 || same_objects(arguments[1], arguments[2]) ? 0 : OTHER_SETTINGS;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = PyTuple_GetItem(tensors, i);
        if (value == Py_None) continue;
        DlTensor described;
        int plain = describe_plain(state, value, &described);
        if (plain < 0) return NULL;
        if (!plain) return PyLong_FromLong(INDIRECT);
        PyObject *requires_grad = PyObject_GetAttr(value, state->requires_grad);
        if (requires_grad == NULL) return NULL;
        Py_DECREF(requires_grad);
        if (requires_grad == Py_True) found |= NEEDS_GRADIENT;
    }
    return PyLong_FromLong(found);
}

/* ---- Layouts ---- */

/* What one call can describe, in 64-bit words. */
#define MAX_WORDS 256

/* Writes all of a tensor but its address: no two layouts give the same words. Returns how many, 0 without room. */
static int put_layout(const DlTensor *tensor, int64_t *words, int room) {
    int dimensions = tensor->dimensions;
    if (room < 3 + 2 * dimensions) return 0;
    *words++ = dimensions;
    *words++ = (int64_t)tensor->device.type << 32 | (uint32_t)tensor->device.index;
    *words++ = (int64_t)tensor->type.lanes << 16 | tensor->type.code << 8 | tensor->type.bits;
    for (int i = 0; i < dimensions; i++) *words++ = tensor->sizes[i];
    for (int i = 0; i < dimensions; i++) *words++ = tensor->strides[i];
    return 3 + 2 * dimensions;
}

/* Reads one value: sets its address and adds its words. Returns how many, 0 where it has none, -1 with an error set. */
static int read_layout(ModuleState *state, PyObject *value, uint64_t *address, int64_t *words, int room) {
    DlTensor described;
    *address = 0;
    if (value == Py_None) {
        if (room < 1) return 0;
        *words = -1;
        return 1;
    }
    int plain = describe_plain(state, value, &described);
    if (plain <= 0) return plain;
    *address = (uint64_t)(uintptr_t)described.data + described.byte_offset;
    return put_layout(&described, words, room);
}

/* Fills the tuple with (bytes of the words, *addresses) and returns it; where that cannot be, lets go of it. */
static PyObject *read_layouts(ModuleState *state, PyObject *tensors, Py_ssize_t count, PyObject *tuple) {
    int64_t words[MAX_WORDS];
    int used = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t address;
        int added = read_layout(state, PyTuple_GetItem(tensors, i), &address, words + used, MAX_WORDS - used);
        if (added <= 0 || put(tuple, i + 1, PyLong_FromUnsignedLongLong(address)) < 0) {
            Py_DECREF(tuple);
            if (added != 0) return NULL;
            Py_RETURN_NONE;
        }
        used += added;
    }
    if (put(tuple, 0, PyBytes_FromStringAndSize((const char *)words, used * (Py_ssize_t)sizeof *words)) < 0) {
        Py_DECREF(tuple);
        return NULL;
    }
    return tuple;
}

PyObject *layouts(PyObject *module, PyObject *tensors) {
    Py_ssize_t count = count_of(tensors, "layouts");
    PyObject *tuple = count < 0 ? NULL : PyTuple_New(count + 1);
    return tuple == NULL ? NULL : read_layouts(PyModule_GetState(module), tensors, count, tuple);
}
