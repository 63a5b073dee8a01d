/* The type Kernel: one kernel of a loaded image, and its launch. */
#include "arguments.h"
#include "loaded_kernel.h"
#include "tensor_map.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <structmember.h>

#define MAX_THREADS 1024
#define MAX_GRID_X 0x7fffffffu
#define MAX_GRID_YZ 65535u

/* launch(device, stream, grid_x, grid_y, grid_z, *arguments) */
enum { DEVICE, STREAM, GRID, FIRST_ARGUMENT = GRID + 3 };

/* Triton's global_scratch and profile_scratch, at the end of every kernel's parameters. */
#define SCRATCH_POINTERS 2

typedef struct {
    PyObject_HEAD
    LoadedKernel loaded;
    PyObject *signature;
    PyObject *map_type; /* TensorMap: a launch compares types with it */
    unsigned grid_limits[3];
    int argument_count;
    char letters[MAX_ARGUMENTS + 1];
    char cooperative;
    char pdl;
} KernelObject;

/* ---- Making and freeing ---- */

/* HIP counts the threads of a grid axis in 32 bits, where CUDA counts blocks. */
static void set_grid_limits(KernelObject *self, unsigned threads) {
    unsigned blocks = UINT_MAX / threads;
    int hip = self->loaded.driver->library.backend == &hip_backend;
    self->grid_limits[0] = hip && blocks < MAX_GRID_X ? blocks : MAX_GRID_X;
    self->grid_limits[1] = MAX_GRID_YZ;
    self->grid_limits[2] = MAX_GRID_YZ;
}

static int check_block(int threads, int shared) {
    if (threads < 1 || threads > MAX_THREADS) {
        PyErr_Format(PyExc_ValueError, "threads is %d, outside 1 to %d", threads, MAX_THREADS);
        return -1;
    }
    if (shared < 0) {
        PyErr_Format(PyExc_ValueError, "shared is %d bytes, less than none", shared);
        return -1;
    }
    return 0;
}

/* Reads the arguments of Driver.load into a new kernel. Returns 0, or -1 with an error set. */
static int read_load_arguments(KernelObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"", "", "threads", "shared", "signature", "cooperative", "pdl", NULL};
    PyObject *image, *name, *signature = NULL;
    int threads = INT_MIN, shared = INT_MIN, cooperative = 0, pdl = 0; /* INT_MIN: not given */
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "SU|$iiUpp:load", names, &image, &name, &threads, &shared,
                                     &signature, &cooperative, &pdl))
        return -1;
    if (threads == INT_MIN || shared == INT_MIN || signature == NULL) {
        PyErr_SetString(PyExc_TypeError, "load() needs the keyword arguments threads, shared and signature");
        return -1;
    }
    if (cooperative && pdl) {
        PyErr_SetString(PyExc_ValueError, "cooperative and pdl are both true: a kernel is launched in one way");
        return -1;
    }
    if (check_block(threads, shared) < 0) return -1;
    const char *letters = text_of(signature, "signature");
    if (letters == NULL || check_signature(letters) < 0) return -1;
    if (loaded_kernel_set(&self->loaded, image, name) < 0) return -1;

    Py_INCREF(signature);
    self->signature = signature;
    self->argument_count = (int)strlen(letters);
    memcpy(self->letters, letters, (size_t)self->argument_count + 1);
    self->loaded.code.threads = (unsigned)threads;
    self->loaded.code.shared = (unsigned)shared;
    self->loaded.code.cooperative = cooperative;
    self->cooperative = (char)cooperative;
    self->loaded.code.pdl = pdl;
    self->pdl = (char)pdl;
    set_grid_limits(self, self->loaded.code.threads);
    return 0;
}

/* Sets the sizes of the parameters that a signature stands for, scratch pointers included; their number. */
static size_t parameter_sizes(const char *letters, size_t *sizes) {
    size_t count = 0;
    for (const char *letter = letters; *letter != 0; letter++) {
        int rank = map_rank(*letter);
        size_t size = *letter == ARGUMENT_INT32 || *letter == ARGUMENT_FLOAT32 ? 4 : rank > 0 ? TENSOR_MAP_BYTES : 8;
        for (int i = 0; i <= 2 * rank; i++) /* a map, its sizes, its strides */
            sizes[count++] = i == 0 ? size : i <= rank ? 4 : 8;
    }
    for (int i = 0; i < SCRATCH_POINTERS; i++) sizes[count++] = 8;
    return count;
}

/* Where the driver can say which parameters the kernel has, they must be the signature's: the driver would read others past
 * the end of what a launch gives it. A launch gives each parameter by itself, so that only sizes matter; where the driver
 * places them depends on where the block of parameters starts. Returns 0, or -1 with an error set. */
static int check_parameters(const KernelObject *self) {
    size_t sizes[MAX_PARAMETERS + SCRATCH_POINTERS], own[MAX_PARAMETERS + SCRATCH_POINTERS], own_count;
    const DriverLibrary *library = &self->loaded.driver->library;
    size_t count = parameter_sizes(self->letters, sizes);
    if (library->backend->parameters == NULL) return 0;
    if (!library->backend->parameters(library, &self->loaded.code, count, own, &own_count)) return 0;
    if (own_count != count) {
        PyErr_Format(PyExc_ValueError, "signature \"%s\" has %zu parameters with the two for scratch memory, kernel %U "
                     "has %zu", self->letters, count, self->loaded.name, own_count);
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        if (own[i] == sizes[i]) continue;
        PyErr_Format(PyExc_ValueError, "signature \"%s\": parameter %zu of kernel %U has %zu bytes, the signature has %zu",
                     self->letters, i + 1, self->loaded.name, own[i], sizes[i]);
        return -1;
    }
    return 0;
}

PyObject *kernel_new(PyTypeObject *type, PyObject *map_type, DriverObject *driver, PyObject *args,
                     PyObject *keywords) {
    KernelObject *self = (KernelObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    loaded_kernel_init(&self->loaded, driver);
    Py_INCREF(map_type);
    self->map_type = map_type;
    if (read_load_arguments(self, args, keywords) < 0 || loaded_kernel_load(&self->loaded) < 0 ||
        check_parameters(self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void kernel_dealloc(PyObject *object) {
    KernelObject *self = (KernelObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    loaded_kernel_free(&self->loaded);
    Py_DECREF(self->map_type);
    Py_XDECREF(self->signature);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* ---- Launching ---- */

static PyObject *kernel_prepare(PyObject *object, PyObject *value) {
    LoadedKernel *loaded = &((KernelObject *)object)->loaded;
    int device;
    if (read_device(value, loaded->driver->library.device_count, &device) < 0) return NULL;
    if (check_not_forked(loaded->driver) < 0) return NULL;
    if (loaded_kernel_prepare(loaded, device) < 0) return NULL;
    Py_RETURN_NONE;
}

static int check_count(const KernelObject *self, Py_ssize_t given) {
    if (given == FIRST_ARGUMENT + self->argument_count) return 0;
    PyErr_Format(PyExc_TypeError,
                 "kernel %U takes %d arguments (signature \"%s\") after device, stream and three grid sizes, not %zd",
                 self->loaded.name, self->argument_count, self->letters, given - FIRST_ARGUMENT);
    return -1;
}

/* Sets `parameters` to what the values become and then the scratch pointers; the driver reads both on launch. */
static int pack_arguments(const KernelObject *self, PyObject *const *values, Slot *slots, Slot *scratch,
                          void **parameters) {
    void **end = parameters;
    for (int i = 0; i < self->argument_count; i++) {
        if (pack_argument(self->map_type, self->letters[i], values[i], &slots[i], &end) < 0) {
            argument_error(self->loaded.name, self->letters, i, values[i]);
            return -1;
        }
    }
    for (int i = 0; i < SCRATCH_POINTERS; i++) *end++ = scratch;
    return 0;
}

/* The GIL is released although a launch is short: it blocks when the device's queue is full, and what empties the
 * queue may be waiting for the GIL. */
static int launch(const LoadedKernel *self, int device, const Launch *request) {
    const DriverLibrary *library = &self->driver->library;
    char doing[128];
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = library->backend->launch(library, &self->code, device, request);
    Py_END_ALLOW_THREADS
    if (outcome.call == NULL) return 0;
    snprintf(doing, sizeof doing, "launching a grid of %u x %u x %u on device %d", request->grid[0],
             request->grid[1], request->grid[2], device);
    raise_kernel_error(self, outcome, doing);
    return -1;
}

static PyObject *kernel_launch(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    KernelObject *self = (KernelObject *)object;
    Slot slots[MAX_ARGUMENTS], null = {.pointer = 0};
    void *parameters[MAX_PARAMETERS + SCRATCH_POINTERS];
    Launch request = {.parameters = parameters};
    int device;
    if (check_count(self, count) < 0) return NULL;
    if (read_device(args[DEVICE], self->loaded.driver->library.device_count, &device) < 0) return NULL;
    if (read_stream(args[STREAM], &request.stream) < 0) return NULL;
    if (read_grid(args + GRID, self->grid_limits, request.grid) < 0) return NULL;
    if (pack_arguments(self, args + FIRST_ARGUMENT, slots, &null, parameters) < 0) return NULL;

    if (check_not_forked(self->loaded.driver) < 0) return NULL;
    if (request.grid[0] == 0 || request.grid[1] == 0 || request.grid[2] == 0) Py_RETURN_NONE;
    if (loaded_kernel_prepare(&self->loaded, device) < 0) return NULL;
    request.function = code_function(&self->loaded.code, device);
    if (launch(&self->loaded, device, &request) < 0) return NULL;
    Py_RETURN_NONE;
}

/* ---- The type ---- */

PyDoc_STRVAR(kernel_doc, "One kernel of a loaded image; Driver.load makes them. Unloads it when freed.");
PyDoc_STRVAR(prepare_doc,
             "prepare($self, device, /)\n--\n\n"
             "Do now what the first launch on `device` would do, once.");
PyDoc_STRVAR(launch_doc,
             "launch($self, device, stream, grid_x, grid_y, grid_z, /, *args)\n--\n\n"
             "Launch on a stream of `device`. The kernel must outlive the launch, and any graph it is captured in.");

static PyMethodDef kernel_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))kernel_launch, METH_FASTCALL, launch_doc},
    {"prepare", kernel_prepare, METH_O, prepare_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef kernel_members[] = {
    {"name", T_OBJECT_EX, offsetof(KernelObject, loaded.name), READONLY, "the kernel's name in its image"},
    {"threads", T_UINT, offsetof(KernelObject, loaded.code.threads), READONLY, "threads a block"},
    {"shared", T_UINT, offsetof(KernelObject, loaded.code.shared), READONLY, "bytes of dynamic shared memory"},
    {"signature", T_OBJECT_EX, offsetof(KernelObject, signature), READONLY, "one letter an argument: p, i, l, f, 1 to 5"},
    {"cooperative", T_BOOL, offsetof(KernelObject, cooperative), READONLY, "launched cooperatively"},
    {"pdl", T_BOOL, offsetof(KernelObject, pdl), READONLY, "may start before the kernel before it has ended"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_doc, (void *)kernel_doc},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_methods, kernel_methods},
    {Py_tp_members, kernel_members},
    {0, NULL},
};

PyType_Spec kernel_type_spec = {
    .name = "liger_aot._launch.Kernel",
    .basicsize = sizeof(KernelObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = kernel_slots,
};
