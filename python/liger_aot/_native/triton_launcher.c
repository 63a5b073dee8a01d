/* The type TritonLauncher: what Triton calls to launch a kernel, which it otherwise has a C compiler make for each
 * signature. Takes the same arguments and gives the driver the same parameters, byte for byte.
 *
 * A program says how a call's arguments become parameters, one letter for each:
 *   p            a pointer: an object with data_ptr(), an int, or None
 *   b h i l      integers of 8, 16, 32, 64 bits; B H I L unsigned, which wrap as Triton's do
 *   e y f d      fp16, bf16 (cut off, as Triton's is), fp32, fp64
 *   _            a constant: no parameter
 *   ( ... )      a tuple
 *   D r f        a tensor descriptor of rank r: pointer, shape, strides and f flags (padding, tf32), shape, strides
 *   M r          the same as a tensor map, then shape and strides; says the next of `maps` how it is encoded
 * Two pointers to scratch memory follow by themselves. */
#include "arguments.h"
#include "module.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

enum { MAX_INSTRUCTIONS = 1024, MOST_PARAMETERS = 1024, MOST_MAPS = 32, SCRATCH_POINTERS = 2, MAP_ALIGNMENT = 64 };
enum { TF32 = 11 }; /* CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 */

/* launch(grid_x, grid_y, grid_z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *arguments) */
enum { GRID_X, GRID_Y, GRID_Z, STREAM, FUNCTION, PACKED_METADATA, LAUNCH_METADATA, ENTER_HOOK, EXIT_HOOK, FIRST };

typedef struct {
    char kind;
    unsigned char rank;
    unsigned char flags;
    short map;  /* an index into maps */
    short next; /* of a tuple: the instruction after it */
    short count; /* of a tuple: how many values */
} Instruction;

typedef struct {
    int swizzle;
    int element_bytes;
    int type; /* CU_TENSOR_MAP_DATA_TYPE_* */
    int rank;
    int mend;    /* a flaw of drivers up to CUDA 13.1, see mend_small_map */
    int doubled; /* the last size is given in bytes of two fp4 values: 1 doubles it in the map, 2 also as a parameter */
    uint32_t box[TENSOR_MAP_MAX_RANK];
} MapLayout;

typedef struct {
    PyObject_HEAD
    DriverObject *driver;
    ModuleState *state;
    PyObject *name;
    PyObject *arguments; /* their names, for errors */
    PyObject *scratch;   /* called with the grid and the stream for both buffers; NULL where there are none */
    Code code;           /* how it is launched: never loaded */
    int device;
    int value_count;
    int parameter_count;
    int instruction_count;
    Instruction *instructions;
    int map_count;
    MapLayout *maps;
} LauncherObject;

typedef union {
    uint64_t bits;
    uint32_t word;
    float float32;
    double float64;
} Value;

/* Of one launch: where its parameters lie. */
typedef struct {
    const LauncherObject *launcher;
    void **parameters;
    Value *values;
    unsigned char *maps; /* aligned */
    int count;
    int map_count;
    int argument; /* the one being packed, for errors */
} Packing;

/* ---- Reading a program ---- */

static const char SCALARS[] = "pbhilBHILeyfd";

static int refuse_program(const char *program, const char *why) {
    PyErr_Format(PyExc_ValueError, "program \"%s\": %s", program, why);
    return -1;
}

/* Reads values up to the end of the tuple or of the program, and moves on. Returns how many, or -1 with an error set. */
static int read_values(LauncherObject *self, const char *program, const char **at, int depth) {
    int count = 0;
    if (depth > 16) return refuse_program(program, "tuples lie more than 16 deep");
    for (; **at != 0 && **at != ')'; count++) {
        if (self->instruction_count == MAX_INSTRUCTIONS) return refuse_program(program, "too many arguments");
        Instruction *one = &self->instructions[self->instruction_count++];
        *one = (Instruction){.kind = *(*at)++};
        if (one->kind == '(') {
            int inside = read_values(self, program, at, depth + 1);
            if (inside < 0) return -1;
            if (*(*at)++ != ')') return refuse_program(program, "a tuple does not end");
            one->count = (short)inside;
            one->next = (short)self->instruction_count;
        } else if (one->kind == 'D' || one->kind == 'M') {
            int rank = *(*at)++ - '0';
            if (rank < 1 || rank > TENSOR_MAP_MAX_RANK) return refuse_program(program, "a rank is not 1 to 5");
            one->rank = (unsigned char)rank;
            if (one->kind == 'D') {
                int flags = *(*at)++ - '0';
                if (flags < 1 || flags > 2) return refuse_program(program, "a descriptor has 1 or 2 flags");
                one->flags = (unsigned char)flags;
                self->parameter_count += 1 + flags + 4 * rank;
            } else {
                one->map = (short)self->map_count++;
                self->parameter_count += 1 + 2 * rank;
            }
        } else if (strchr(SCALARS, one->kind) != NULL) {
            self->parameter_count++;
        } else if (one->kind != '_') {
            return refuse_program(program, "a letter is none of pbhilBHILeyfd_()DM");
        }
        if (self->parameter_count > MOST_PARAMETERS) return refuse_program(program, "more than 1024 parameters");
        if (self->map_count > MOST_MAPS) return refuse_program(program, "more than 32 tensor maps");
    }
    return count;
}

static int read_program(LauncherObject *self, const char *program) {
    const char *at = program;
    self->instructions = calloc(strlen(program) + 1, sizeof *self->instructions);
    if (self->instructions == NULL) return PyErr_NoMemory(), -1;
    self->value_count = read_values(self, program, &at, 0);
    if (self->value_count < 0) return -1;
    return *at == 0 ? 0 : refuse_program(program, "a tuple ends that has not begun");
}

/* maps: ((swizzle, element bytes, type, doubled, mend, (box...)), ...) */
static int read_maps(LauncherObject *self, PyObject *maps) {
    if (PyTuple_Size(maps) != self->map_count)
        return PyErr_Format(PyExc_ValueError, "maps has %zd, the program %d", PyTuple_Size(maps), self->map_count), -1;
    self->maps = calloc((size_t)self->map_count + 1, sizeof *self->maps);
    if (self->maps == NULL) return PyErr_NoMemory(), -1;
    for (int i = 0; i < self->map_count; i++) {
        MapLayout *map = &self->maps[i];
        PyObject *box;
        if (!PyArg_ParseTuple(PyTuple_GetItem(maps, i), "iiiiiO!", &map->swizzle, &map->element_bytes, &map->type,
                              &map->doubled, &map->mend, &PyTuple_Type, &box))
            return -1;
        Py_ssize_t rank = PyTuple_Size(box);
        if (rank < 1 || rank > TENSOR_MAP_MAX_RANK)
            return PyErr_Format(PyExc_ValueError, "a box of %zd dimensions", rank), -1;
        map->rank = (int)rank;
        for (int d = 0; d < rank; d++) {
            long size = PyLong_AsLong(PyTuple_GetItem(box, d));
            if (size == -1 && PyErr_Occurred()) return -1;
            map->box[rank - 1 - d] = (uint32_t)size;
        }
    }
    for (int i = 0; i < self->instruction_count; i++) {
        Instruction *one = &self->instructions[i];
        if (one->kind == 'M' && self->maps[one->map].rank != one->rank)
            return PyErr_Format(PyExc_ValueError, "a tensor map of %d dimensions has a box of %d", one->rank,
                                self->maps[one->map].rank), -1;
    }
    return 0;
}

/* ---- Packing ---- */

/* Says which argument of which kernel an error is about; what it said stays in the text. Errors that are no more than a
 * text: others, such as the driver's, have fields. */
static int argument_failed(const Packing *packing) {
    PyObject *type, *value, *traceback;
    const LauncherObject *self = packing->launcher;
    PyErr_Fetch(&type, &value, &traceback);
    if (type != PyExc_TypeError && type != PyExc_ValueError && type != PyExc_OverflowError &&
        type != PyExc_AttributeError) {
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    PyObject *names = self->arguments;
    PyObject *name = packing->argument < PyTuple_Size(names) ? PyTuple_GetItem(names, packing->argument) : Py_None;
    PyErr_Format(type, "kernel %U, argument %S: %S", self->name, name, value == NULL ? Py_None : value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

static Value *next_value(Packing *packing) {
    Value *value = &packing->values[packing->count];
    packing->parameters[packing->count++] = value;
    return value;
}

/* Numbers of other libraries come as ints do, by __index__. A new reference. */
static PyObject *as_int(PyObject *value) {
    if (PyLong_Check(value)) {
        Py_INCREF(value);
        return value;
    }
    return PyNumber_Index(value);
}

static int read_signed(PyObject *value, long long least, long long most, int64_t *number) {
    PyObject *integer = as_int(value);
    if (integer == NULL) return -1;
    int overflow;
    long long found = PyLong_AsLongLongAndOverflow(integer, &overflow);
    Py_DECREF(integer);
    if (found == -1 && PyErr_Occurred()) return -1;
    if (overflow != 0 || found < least || found > most) {
        PyErr_Format(PyExc_OverflowError, "%R is outside %lld to %lld", value, least, most);
        return -1;
    }
    *number = found;
    return 0;
}

static int pack_signed(Packing *packing, PyObject *value, long long least, long long most) {
    int64_t number;
    if (read_signed(value, least, most, &number) < 0) return -1;
    next_value(packing)->bits = (uint64_t)number;
    return 0;
}

static int pack_unsigned(Packing *packing, PyObject *value) {
    PyObject *integer = as_int(value);
    if (integer == NULL) return -1;
    unsigned long long bits = PyLong_AsUnsignedLongLongMask(integer);
    Py_DECREF(integer);
    if (bits == ULLONG_MAX && PyErr_Occurred()) return -1;
    next_value(packing)->bits = bits;
    return 0;
}

/* To the nearest, of two the even one. Returns -1 where it is none. */
static int to_fp16(double number, uint16_t *half) {
    union {
        double number;
        uint64_t bits;
    } wide = {.number = number};
    uint64_t fraction = wide.bits & 0xfffffffffffffull;
    int exponent = (int)(wide.bits >> 52 & 0x7ff) - 1023;
    uint16_t sign = (uint16_t)(wide.bits >> 48 & 0x8000);
    if (exponent == 1024) { /* infinite, or no number */
        *half = (uint16_t)(sign | 0x7c00 | (fraction ? 0x200 | (uint16_t)(fraction >> 42) : 0));
        return 0;
    }
    if (exponent < -25 || (wide.bits << 1) == 0) {
        *half = sign;
        return 0;
    }
    uint64_t significand = fraction | 1ull << 52;
    int shift = exponent < -14 ? 42 - 14 - exponent : 42; /* subnormal ones have fewer bits */
    uint64_t kept = significand >> shift, rest = significand & ((1ull << shift) - 1), middle = 1ull << (shift - 1);
    if (rest > middle || (rest == middle && (kept & 1))) kept++;
    uint64_t bits = exponent < -14 ? kept : kept + ((uint64_t)(exponent + 14) << 10);
    if (bits >= 0x7c00) return -1;
    *half = (uint16_t)(sign | bits);
    return 0;
}

static int pack_float(Packing *packing, char kind, PyObject *value) {
    double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) return -1;
    Value *slot = next_value(packing);
    uint16_t half = 0;
    slot->bits = 0;
    switch (kind) {
        case 'd': slot->float64 = number; return 0;
        case 'f': slot->float32 = (float)number; return 0;
        case 'y':
            slot->float32 = (float)number;
            slot->word >>= 16;
            return 0;
        default:
            if (to_fp16(number, &half) < 0) return PyErr_Format(PyExc_OverflowError, "%R is no float16", value), -1;
            slot->word = half;
            return 0;
    }
}

/* What kernels find at an address that may be the host's. */
static int check_address(const Packing *packing, uint64_t address, Value *slot) {
    const DriverLibrary *library = &packing->launcher->driver->library;
    void *accessible = NULL;
    Outcome outcome = library->backend->find_memory(library, (void *)(uintptr_t)address, &accessible);
    slot->bits = (uint64_t)(uintptr_t)accessible;
    if (outcome.call != NULL) {
        raise_driver_error(packing->launcher->driver, outcome, "looking up where a tensor lies");
        return -1;
    }
    if (accessible != NULL) return 0;
    PyErr_SetString(PyExc_ValueError, "its memory cannot be accessed from Triton (cpu tensor?)");
    return -1;
}

static int read_data_ptr(const Packing *packing, PyObject *value, uint64_t *address) {
    PyObject *answer = PyObject_CallMethodObjArgs(value, packing->launcher->state->data_ptr, NULL);
    if (answer == NULL) {
        PyErr_Format(PyExc_TypeError, "a pointer is an int, None or has a data_ptr method; got %R", Py_TYPE(value));
        return -1;
    }
    int is_int = PyLong_Check(answer);
    if (is_int) *address = PyLong_AsUnsignedLongLong(answer);
    else PyErr_Format(PyExc_TypeError, "data_ptr() returned %R, not an int", answer);
    Py_DECREF(answer);
    return !is_int || (*address == ULLONG_MAX && PyErr_Occurred()) ? -1 : 0;
}

static int read_pointer(const Packing *packing, PyObject *value, Value *slot) {
    uint64_t address = 0;
    int on_gpu = 0;
    slot->bits = 0;
    if (value == Py_None) return 0;
    if (PyLong_Check(value)) {
        slot->bits = PyLong_AsUnsignedLongLong(value);
        return slot->bits == ULLONG_MAX && PyErr_Occurred() ? -1 : 0;
    }
    int known = tensor_address(packing->launcher->state, value, &address, &on_gpu);
    if (known < 0 || (known == 0 && read_data_ptr(packing, value, &address) < 0)) return -1;
    slot->bits = address;
    return address == 0 || on_gpu ? 0 : check_address(packing, address, slot);
}

static int pack_pointer(Packing *packing, PyObject *value) {
    return read_pointer(packing, value, next_value(packing));
}

/* The numbers of a descriptor's shape or strides. */
static int read_numbers(PyObject *descriptor, PyObject *name, int rank, int64_t *numbers) {
    PyObject *values = PyObject_GetAttr(descriptor, name);
    if (values == NULL) return -1;
    Py_ssize_t count = PySequence_Size(values);
    int result = count == rank ? 0 : -1;
    if (count >= 0 && count != rank)
        PyErr_Format(PyExc_ValueError, "%U of a tensor descriptor has %zd numbers, not %d", name, count, rank);
    for (int i = 0; result == 0 && i < rank; i++) {
        PyObject *item = PySequence_GetItem(values, i);
        result = item == NULL ? -1 : read_signed(item, LLONG_MIN, LLONG_MAX, &numbers[i]);
        Py_XDECREF(item);
    }
    Py_DECREF(values);
    return result;
}

/* Whether an attribute is true, or equal to a text; -1 with an error set. */
static int read_flag(PyObject *descriptor, PyObject *name, const char *text) {
    PyObject *value = PyObject_GetAttr(descriptor, name);
    if (value == NULL) return -1;
    int flag = text == NULL ? PyObject_IsTrue(value)
                            : PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, text) == 0;
    Py_DECREF(value);
    return flag;
}

static void put_sizes(Packing *packing, int rank, const int64_t *sizes, const int64_t *strides) {
    for (int i = 0; i < rank; i++) next_value(packing)->bits = (uint64_t)sizes[i];
    for (int i = 0; i < rank; i++) next_value(packing)->bits = (uint64_t)strides[i];
}

static int check_sizes(int rank, const int64_t *sizes) {
    for (int i = 0; i < rank; i++) {
        if (sizes[i] >= INT32_MIN && sizes[i] <= INT32_MAX) continue;
        PyErr_Format(PyExc_OverflowError, "a tensor descriptor's size %lld is no int32", (long long)sizes[i]);
        return -1;
    }
    return 0;
}

/* Drivers up to CUDA 13.1 encode tensors of less than 128 KiB with a bit set that is not to be: CUTLASS and Triton (from
 * 3.7 on) take it away. */
static void mend_small_map(const DriverLibrary *library, const MapLayout *layout, const TensorMapRequest *request,
                           void *map) {
    enum { LAST_FLAWED = 13010, SMALL = 128 * 1024, BIT = 21 };
    if (!layout->mend || library->version > LAST_FLAWED) return;
    uint64_t last_byte = 0, *words = map;
    for (unsigned i = 0; i < request->rank; i++)
        last_byte += (request->sizes[i] - 1) * (i == 0 ? (uint64_t)layout->element_bytes : request->strides[i - 1]);
    if (last_byte + 1 < SMALL) words[1] &= ~(1ull << BIT);
}

/* Encodes a tensor map; the driver counts dimensions from the innermost and strides in bytes. */
static int encode_map(Packing *packing, const MapLayout *layout, uint64_t address, const int64_t *sizes,
                      const int64_t *strides, int nan, int tf32) {
    const LauncherObject *self = packing->launcher;
    const Backend *backend = self->driver->library.backend;
    int rank = layout->rank;
    TensorMapRequest request = {
        .address = (void *)(uintptr_t)address,
        .type = tf32 ? TF32 : layout->type,
        .rank = (unsigned)rank,
        .swizzle = layout->swizzle,
        .fill_nan = nan,
    };
    if (strides[rank - 1] != 1) {
        PyErr_Format(PyExc_ValueError, "a tensor descriptor's last stride is %lld, not 1", (long long)strides[rank - 1]);
        return -1;
    }
    for (int i = 0; i < rank; i++) {
        int inner = rank - 1 - i;
        request.sizes[inner] = (uint64_t)sizes[i] << (layout->doubled > 0 && inner == 0);
        request.box[inner] = layout->box[inner];
        if (inner > 0) request.strides[inner - 1] = (uint64_t)(strides[i] * layout->element_bytes);
    }
    void *map = packing->maps + TENSOR_MAP_BYTES * packing->map_count++;
    packing->parameters[packing->count++] = map;
    Outcome outcome = backend->encode(&self->driver->library, &request, map);
    if (outcome.call == NULL) {
        mend_small_map(&self->driver->library, layout, &request, map);
        return 0;
    }
    raise_driver_error(self->driver, outcome, "encoding a tensor map");
    return -1;
}

static int pack_descriptor(Packing *packing, const Instruction *one, PyObject *value) {
    const ModuleState *state = packing->launcher->state;
    int64_t sizes[TENSOR_MAP_MAX_RANK], strides[TENSOR_MAP_MAX_RANK];
    int rank = one->rank, tf32 = 0, needs_tf32 = one->kind == 'M' ? PyObject_HasAttr(value, state->tf32) : one->flags > 1;
    if (read_numbers(value, state->shape, rank, sizes) < 0 || read_numbers(value, state->strides, rank, strides) < 0)
        return -1;
    int nan = read_flag(value, state->padding, "nan");
    if (nan < 0 || (needs_tf32 && (tf32 = read_flag(value, state->tf32, NULL)) < 0) || check_sizes(rank, sizes) < 0)
        return -1;
    PyObject *base = PyObject_GetAttr(value, state->base);
    if (base == NULL) return -1;
    Value address;
    int result = read_pointer(packing, base, &address);
    Py_DECREF(base);
    if (result < 0) return -1;
    if (one->kind == 'M') {
        const MapLayout *layout = &packing->launcher->maps[one->map];
        if (encode_map(packing, layout, address.bits, sizes, strides, nan, tf32) < 0) return -1;
        if (layout->doubled == 2) sizes[rank - 1] *= 2;
    } else {
        *next_value(packing) = address;
        put_sizes(packing, rank, sizes, strides);
        next_value(packing)->bits = (uint64_t)nan;
        if (one->flags > 1) next_value(packing)->bits = (uint64_t)tf32;
    }
    put_sizes(packing, rank, sizes, strides);
    return 0;
}

static int pack_value(Packing *packing, const Instruction *one, PyObject *value);

/* A tuple's values; `one` is the tuple's own instruction, those of its values follow it. */
static int pack_tuple(Packing *packing, const Instruction *one, PyObject *value) {
    const Instruction *all = packing->launcher->instructions;
    if (!PySequence_Check(value))
        return PyErr_Format(PyExc_TypeError, "expected a tuple of %d values, got %R", one->count, Py_TYPE(value)), -1;
    Py_ssize_t given = PySequence_Size(value);
    if (given != one->count) {
        if (given >= 0) PyErr_Format(PyExc_TypeError, "expected a tuple of %d values, got %zd", one->count, given);
        return -1;
    }
    const Instruction *inner = one + 1;
    for (int i = 0; i < one->count; i++) {
        PyObject *item = PySequence_GetItem(value, i);
        if (item == NULL) return -1;
        int result = pack_value(packing, inner, item);
        Py_DECREF(item);
        if (result < 0) return -1;
        inner = inner->kind == '(' ? all + inner->next : inner + 1;
    }
    return 0;
}

static int pack_value(Packing *packing, const Instruction *one, PyObject *value) {
    switch (one->kind) {
        case '_': return 0;
        case 'p': return pack_pointer(packing, value);
        case 'b': return pack_signed(packing, value, INT8_MIN, UINT8_MAX); /* a bool, or a byte of either kind */
        case 'h': return pack_signed(packing, value, INT16_MIN, INT16_MAX);
        case 'i': return pack_signed(packing, value, INT32_MIN, INT32_MAX);
        case 'l': return pack_signed(packing, value, LLONG_MIN, LLONG_MAX);
        case 'B':
        case 'H':
        case 'I':
        case 'L': return pack_unsigned(packing, value);
        case '(': return pack_tuple(packing, one, value);
        case 'D':
        case 'M': return pack_descriptor(packing, one, value);
        default: return pack_float(packing, one->kind, value);
    }
}

static int pack_all(Packing *packing, PyObject *const *values) {
    const LauncherObject *self = packing->launcher;
    const Instruction *one = self->instructions;
    for (int i = 0; i < self->value_count; i++) {
        packing->argument = i;
        if (pack_value(packing, one, values[i]) < 0) return argument_failed(packing);
        one = one->kind == '(' ? self->instructions + one->next : one + 1;
    }
    return 0;
}

/* ---- Launching ---- */

/* Triton keeps hooks in a chain, which is there without any. */
static int is_empty_chain(const ModuleState *state, PyObject *hook) {
    PyObject *calls = PyObject_GetAttr(hook, state->calls);
    int empty = calls != NULL && PyList_Check(calls) && PyList_Size(calls) == 0;
    Py_XDECREF(calls);
    PyErr_Clear();
    return empty;
}

static int call_hook(const LauncherObject *self, PyObject *hook, PyObject *metadata) {
    if (hook == Py_None || is_empty_chain(self->state, hook)) return 0;
    PyObject *answer = PyObject_CallFunctionObjArgs(hook, metadata, NULL);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* As Triton has it: a grid of nothing, or of less, launches nothing. */
static int read_grid_of_triton(PyObject *const *values, int cluster, unsigned grid[3]) {
    static const char *const names[] = {"grid[0]", "grid[1]", "grid[2]"};
    int64_t sizes[3];
    int empty = 0;
    for (int axis = 0; axis < 3; axis++) {
        if (read_signed(values[axis], INT32_MIN, INT32_MAX, &sizes[axis]) < 0) {
            if (PyErr_ExceptionMatches(PyExc_OverflowError))
                PyErr_Format(PyExc_OverflowError, "%s is %R: no int32", names[axis], values[axis]);
            return -1;
        }
        if (sizes[axis] <= 0) empty = 1;
    }
    for (int axis = 0; axis < 3; axis++) grid[axis] = empty ? 0 : (unsigned)sizes[axis];
    if (cluster > 1) {
        if (sizes[0] > INT32_MAX / cluster) {
            PyErr_Format(PyExc_OverflowError, "grid[0] is %R clusters of %d blocks: more than 2**31 - 1 blocks", values[0],
                         cluster);
            return -1;
        }
        grid[0] *= (unsigned)cluster;
    }
    return 0;
}

/* Buffers that this launch alone uses; `*kept` holds them until it is on its way. */
static int get_scratch(const LauncherObject *self, PyObject *const *args, Packing *packing, Value scratch[2],
                       PyObject **kept) {
    scratch[0].bits = scratch[1].bits = 0;
    if (self->scratch == NULL) return 0;
    *kept = PyObject_CallFunctionObjArgs(self->scratch, args[GRID_X], args[GRID_Y], args[GRID_Z], args[STREAM], NULL);
    if (*kept == NULL) return -1;
    if (!PyTuple_Check(*kept) || PyTuple_Size(*kept) != SCRATCH_POINTERS) {
        PyErr_SetString(PyExc_TypeError, "scratch must return two buffers");
        return -1;
    }
    for (int i = 0; i < SCRATCH_POINTERS; i++)
        if (read_pointer(packing, PyTuple_GetItem(*kept, i), &scratch[i]) < 0) return -1;
    return 0;
}

static int launch_now(const LauncherObject *self, const Launch *request) {
    Outcome outcome;
    const DriverLibrary *library = &self->driver->library;
    Py_BEGIN_ALLOW_THREADS
    outcome = library->backend->launch(library, &self->code, self->device, request);
    Py_END_ALLOW_THREADS
    if (outcome.call == NULL) return 0;
    char doing[384];
    const char *name = PyUnicode_AsUTF8AndSize(self->name, NULL);
    snprintf(doing, sizeof doing,
             "launching a grid of %u x %u x %u on device %d (kernel %.200s: %u threads, %u bytes of shared memory)",
             request->grid[0], request->grid[1], request->grid[2], self->device, name == NULL ? "?" : name,
             self->code.threads, self->code.shared);
    raise_driver_error(self->driver, outcome, doing);
    return -1;
}

static PyObject *launcher_launch(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    const LauncherObject *self = (LauncherObject *)object;
    Value values[MOST_PARAMETERS], scratch[SCRATCH_POINTERS];
    void *parameters[MOST_PARAMETERS + SCRATCH_POINTERS];
    unsigned char maps[MOST_MAPS * TENSOR_MAP_BYTES + MAP_ALIGNMENT];
    uintptr_t aligned = ((uintptr_t)maps + MAP_ALIGNMENT - 1) & ~(uintptr_t)(MAP_ALIGNMENT - 1);
    Packing packing = {.launcher = self, .parameters = parameters, .values = values, .maps = (unsigned char *)aligned};
    Launch request = {.parameters = parameters};
    void *function = NULL;
    PyObject *kept = NULL;
    if (count != FIRST + self->value_count)
        return PyErr_Format(PyExc_TypeError, "kernel %U takes %d arguments, not %zd", self->name, self->value_count,
                            count - FIRST);
    if (read_grid_of_triton(args, self->code.cluster, request.grid) < 0) return NULL;
    if (read_stream(args[STREAM], &request.stream) < 0 || read_stream(args[FUNCTION], &function) < 0) return NULL;
    request.function = function;
    int result = get_scratch(self, args, &packing, scratch, &kept);
    if (result == 0) result = call_hook(self, args[ENTER_HOOK], args[LAUNCH_METADATA]);
    if (result == 0) result = pack_all(&packing, args + FIRST);
    if (result == 0) {
        for (int i = 0; i < SCRATCH_POINTERS; i++) parameters[packing.count + i] = &scratch[i];
        result = check_not_forked(self->driver);
        if (result == 0 && request.grid[0] != 0) result = launch_now(self, &request);
    }
    Py_XDECREF(kept);
    if (result == 0) result = call_hook(self, args[EXIT_HOOK], args[LAUNCH_METADATA]);
    if (result < 0) return NULL;
    Py_RETURN_NONE;
}

/* ---- Making and freeing ---- */

static int read_launcher_arguments(LauncherObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"", "", "device", "threads", "shared", "arguments", "maps", "cluster", "cooperative", "pdl",
                            "scratch", NULL};
    PyObject *name, *program, *device, *maps, *arguments, *scratch = Py_None;
    int threads, shared, cluster = 1, cooperative = 0, pdl = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "UUOiiO!O!|ippO:triton_launcher", names, &name, &program, &device,
                                     &threads, &shared, &PyTuple_Type, &arguments, &PyTuple_Type, &maps, &cluster,
                                     &cooperative, &pdl, &scratch))
        return -1;
    Py_INCREF(name);
    self->name = name;
    Py_INCREF(arguments);
    self->arguments = arguments;
    if (scratch != Py_None) {
        Py_INCREF(scratch);
        self->scratch = scratch;
    }
    if (read_device(device, self->driver->library.device_count, &self->device) < 0) return -1;
    if (threads < 1 || threads > 1024 || shared < 0 || cluster < 1 || cluster > 16) {
        PyErr_Format(PyExc_ValueError, "%d threads, %d bytes of shared memory, clusters of %d: no GPU has that", threads,
                     shared, cluster);
        return -1;
    }
    self->code = (Code){.threads = (unsigned)threads, .shared = (unsigned)shared, .cluster = cluster,
                        .cooperative = cooperative, .pdl = pdl};
    const char *text = PyUnicode_AsUTF8AndSize(program, NULL);
    if (text == NULL || read_program(self, text) < 0 || read_maps(self, maps) < 0) return -1;
    const Backend *backend = self->driver->library.backend;
    if (self->map_count > 0 && backend->encode == NULL)
        return PyErr_Format(PyExc_ValueError, "the %s driver has no tensor maps", backend->name), -1;
    if (cluster > 1 && backend == &hip_backend)
        return PyErr_Format(PyExc_ValueError, "clusters are not launched through the hip driver"), -1;
    return 0;
}

PyObject *triton_launcher_new(PyTypeObject *type, ModuleState *state, DriverObject *driver, PyObject *args,
                              PyObject *keywords) {
    LauncherObject *self = (LauncherObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(driver);
    self->driver = driver;
    self->state = state;
    if (read_launcher_arguments(self, args, keywords) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void launcher_dealloc(PyObject *object) {
    LauncherObject *self = (LauncherObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    free(self->instructions);
    free(self->maps);
    Py_XDECREF(self->scratch);
    Py_XDECREF(self->arguments);
    Py_XDECREF(self->name);
    Py_DECREF(self->driver);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* Its scratch may be a closure that leads back to it. */
static int launcher_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((LauncherObject *)object)->scratch);
    return 0;
}

static int launcher_clear(PyObject *object) {
    Py_CLEAR(((LauncherObject *)object)->scratch);
    return 0;
}

PyDoc_STRVAR(launcher_doc, "Launches one kernel as Triton's own launchers do; Driver.triton_launcher makes them.");
PyDoc_STRVAR(launch_doc,
             "launch($self, grid_x, grid_y, grid_z, stream, function, packed_metadata, launch_metadata, enter_hook,\n"
             "       exit_hook, /, *args)\n--\n\n"
             "Launch, between the two hooks.");

static PyMethodDef launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launcher_launch, METH_FASTCALL, launch_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef launcher_members[] = {
    {"name", T_OBJECT_EX, offsetof(LauncherObject, name), READONLY, "the kernel's name"},
    {"device", T_INT, offsetof(LauncherObject, device), READONLY, "the device it launches on"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, (void *)launcher_doc},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_traverse, launcher_traverse},
    {Py_tp_clear, launcher_clear},
    {Py_tp_methods, launcher_methods},
    {Py_tp_members, launcher_members},
    {0, NULL},
};

PyType_Spec triton_launcher_type_spec = {
    .name = "liger_aot._launch.TritonLauncher",
    .basicsize = sizeof(LauncherObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = launcher_slots,
};
