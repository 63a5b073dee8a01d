/* What the launcher asks of a GPU driver. Nothing here knows Python: every function may run without the GIL.
 *
 * A driver library is opened by name or path at run time, so the extension has no link-time dependency on CUDA or
 * HIP. `cuda.c` and `hip.c` each fill one `Backend` table; `driver.c` holds what the two have in common. */
#ifndef LIGER_AOT_DRIVER_H
#define LIGER_AOT_DRIVER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* The extension exports its init function alone, whatever flags it is built with. */
#pragma GCC visibility push(hidden)

/* The end of a driver call, or of several: `call` names the one that failed, or is NULL when all went well. */
typedef struct {
    const char *call;
    int code;
} Outcome;

#define SUCCEEDED ((Outcome){NULL, 0})

/* The `call` of an outcome where memory ran out before any driver was asked: compare the pointer. */
extern const char OUT_OF_MEMORY[];

/* A function to find in the library, and where its address goes in the backend's table of functions. */
typedef struct {
    const char *name;
    size_t offset;
    int optional;
} Symbol;

typedef struct Backend Backend;

/* One GPU. The context is its primary one, retained when the first kernel is prepared there (CUDA only). */
typedef struct {
    int handle;
    _Atomic(void *) context;
} Device;

typedef struct {
    const Backend *backend;
    void *functions; /* the backend's table, filled from its symbols */
    int version;
    int device_count;
    Device *devices;
    pthread_mutex_t retaining; /* held while a device's context is retained */
    int forks; /* how often the process had been forked when this was opened */
} DriverLibrary;

/* A kernel on one device: `function` is what is launched, NULL until the kernel is ready there. */
typedef struct {
    void *module; /* HIP only: one load per device */
    _Atomic(void *) function;
} DeviceCode;

/* A kernel as the driver sees it. `image` and `name` belong to the caller and outlive this. */
typedef struct {
    const void *image;
    const char *name;
    unsigned threads;
    unsigned shared;
    int cooperative;
    int pdl; /* programmatic dependent launch: may start before the kernel before it has ended, and waits itself */
    int cluster; /* blocks of a cluster along x: 0 and 1 both mean none */
    int any_time; /* to be loaded also while a graph is captured, of which loading is no part */
    void *library; /* CUDA only: one load for all devices */
    void *kernel;
    DeviceCode *devices;
    pthread_mutex_t preparing; /* held while the kernel is made ready on a device */
} Code;

typedef struct {
    unsigned grid[3]; /* in blocks, also where these form clusters */
    void *stream;
    void **parameters;
    void *function; /* what the backend keeps in a DeviceCode */
} Launch;

/* What a driver says of a kernel on a device. */
typedef struct {
    int registers;
    int local_bytes; /* a thread: what it spilled, and its stack */
    int max_threads;
} KernelFacts;

#define TENSOR_MAP_BYTES 128
#define TENSOR_MAP_MAX_RANK 5

/* A tensor to be read and written in boxes, the innermost dimension first. */
typedef struct {
    void *address;
    int type; /* CU_TENSOR_MAP_DATA_TYPE_* */
    unsigned rank;
    int swizzle;
    uint64_t sizes[TENSOR_MAP_MAX_RANK];
    uint64_t strides[TENSOR_MAP_MAX_RANK]; /* in bytes; that of the innermost dimension is left out */
    uint32_t box[TENSOR_MAP_MAX_RANK];
    int fill_nan; /* what lies outside the tensor reads as NaN, not as zero */
} TensorMapRequest;

struct Backend {
    const char *name;
    const Symbol *symbols;
    size_t symbol_count;
    size_t functions_size;
    int already_deinitialized; /* the code of a driver that has shut down before us */
    /* Initialises the driver; sets its version and the number of devices. */
    Outcome (*start)(DriverLibrary *driver);
    /* Sets devices[].handle, once the array is there. */
    Outcome (*list_devices)(DriverLibrary *driver);
    /* Gives back what the driver library holds on the devices. */
    void (*stop)(DriverLibrary *driver);
    /* What can be done for all devices at once when a kernel is loaded. */
    Outcome (*load)(const DriverLibrary *driver, Code *code);
    /* Sets devices[device].function; called with `preparing` held, and only while that is NULL. */
    Outcome (*prepare)(DriverLibrary *driver, Code *code, int device);
    Outcome (*launch)(const DriverLibrary *driver, const Code *code, int device, const Launch *launch);
    Outcome (*unload)(const DriverLibrary *driver, Code *code);
    /* What the driver says of a kernel that is ready on a device. */
    Outcome (*facts)(const DriverLibrary *driver, const Code *code, int device, KernelFacts *facts);
    /* Sets `accessible` to the address at which kernels find what lies at `address`, NULL where they can't. */
    Outcome (*find_memory)(const DriverLibrary *driver, void *address, void **accessible);
    /* Whether the driver says which parameters a loaded kernel has: how many, as far as it says more than that there are
     * `most`, and how many bytes the first `most` have. It is not asked for others: that would be an error, which
     * compute-sanitizer reports. NULL where no driver of the backend says. */
    int (*parameters)(const DriverLibrary *driver, const Code *code, size_t most, size_t *sizes, size_t *count);
    /* Writes TENSOR_MAP_BYTES to `map`, which is 64-byte aligned; needs no device. NULL where there is no such thing. */
    Outcome (*encode)(const DriverLibrary *driver, const TensorMapRequest *request, void *map);
    /* The driver's own words for a code; neither is ever NULL. */
    void (*describe)(const DriverLibrary *driver, int code, const char **name, const char **text);
};

extern const Backend cuda_backend;
extern const Backend hip_backend;

/* The signature of cuLaunchKernel, cuLaunchCooperativeKernel and, but for its last argument, both HIP equivalents. */
typedef int (*LaunchFunction)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                              void **extra);
typedef int (*LaunchCooperativeFunction)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                         unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                         void *stream, void **parameters);

/* Opens `path` and finds the backend's symbols. Returns 0, or -1 with the reason in `reason`. */
int driver_open(DriverLibrary *driver, const Backend *backend, const char *path, char *reason, size_t capacity);

/* Initialises an opened driver and lists its devices. The outcome may be OUT_OF_MEMORY. */
Outcome driver_start(DriverLibrary *driver);

/* Whether this process was forked after the driver had been opened. GPU drivers don't work there: their calls fail or wait
 * for ever, and a mutex here may be held by a thread that the parent alone has. Ask before any other function. */
int driver_is_inherited(const DriverLibrary *driver);

/* Frees what driver_open and driver_start made. With `release` 0 the driver itself is left alone. */
void driver_close(DriverLibrary *driver, int release);

/* Loads the code as far as that needs no device. The outcome may be OUT_OF_MEMORY. */
Outcome code_load(const DriverLibrary *driver, Code *code);

/* Makes the code ready to launch on `device`, once; any number of threads may ask at the same time. */
Outcome code_prepare(DriverLibrary *driver, Code *code, int device);

/* Frees what code_load and code_prepare made. With `release` 0 the driver itself is left alone. */
Outcome code_unload(const DriverLibrary *driver, Code *code, int release);

static inline int code_is_ready(const Code *code, int device) {
    return atomic_load_explicit(&code->devices[device].function, memory_order_acquire) != NULL;
}

/* What a launch on `device` names the code by; NULL until it is ready there. */
static inline void *code_function(const Code *code, int device) {
    return atomic_load_explicit(&code->devices[device].function, memory_order_acquire);
}

/* Calls one of a backend's launch functions with the block and shared memory that the code was compiled for. */
static inline int call_launch(LaunchFunction call, const Code *code, const Launch *launch) {
    return call(launch->function, launch->grid[0], launch->grid[1], launch->grid[2], code->threads, 1, 1, code->shared,
                launch->stream, launch->parameters, NULL);
}

static inline int call_launch_cooperative(LaunchCooperativeFunction call, const Code *code, const Launch *launch) {
    return call(launch->function, launch->grid[0], launch->grid[1], launch->grid[2], code->threads, 1, 1, code->shared,
                launch->stream, launch->parameters);
}

#pragma GCC visibility pop
#endif
