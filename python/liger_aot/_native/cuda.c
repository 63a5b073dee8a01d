/* The CUDA driver API. One cuLibraryLoadData serves every GPU of the process (CUDA 12.0 and later, R525). */
#include "driver.h"

#define DEINITIALIZED 4
#define INVALID_VALUE 1
#define INVALID_CONTEXT 201
#define POINTER_DEVICE_POINTER 3 /* CU_POINTER_ATTRIBUTE_* */
#define CAPTURE_MODE_RELAXED 2   /* CU_STREAM_CAPTURE_MODE_* */
#define PORTABLE_CLUSTER 8       /* blocks; larger clusters are to be asked for */
/* CU_FUNC_ATTRIBUTE_* */
enum { MAX_THREADS_PER_BLOCK = 0, LOCAL_SIZE_BYTES = 3, NUM_REGS = 4, NON_PORTABLE_CLUSTER = 14 };
#define MAX_DYNAMIC_SHARED_SIZE_BYTES 8
#define SHARED_WITHOUT_OPT_IN (48u * 1024)
#define PDL_IN_GRAPHS 12030 /* the first driver whose graphs can capture a programmatic dependent launch */

/* CUlaunchAttribute and CUlaunchConfig, the same on every 64-bit platform since CUDA 11.8. */
typedef struct {
    int id;
    char unused[4];
    union {
        char bytes[64];
        int flag;
        unsigned dimensions[3];
    } value;
} LaunchAttribute;

typedef struct {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared;
    void *stream;
    LaunchAttribute *attributes;
    unsigned attribute_count;
} LaunchConfiguration;

_Static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8, "CUlaunchAttribute");
_Static_assert(sizeof(LaunchConfiguration) == 56 && offsetof(LaunchConfiguration, stream) == 32 &&
                   offsetof(LaunchConfiguration, attribute_count) == 48,
               "CUlaunchConfig");

typedef struct {
    int (*init)(unsigned flags);
    int (*driver_version)(int *version);
    int (*device_count)(int *count);
    int (*device_get)(int *device, int ordinal);
    int (*error_name)(int code, const char **name);
    int (*error_text)(int code, const char **text);
    int (*context_retain)(void **context, int device);
    int (*context_release)(int device);
    int (*context_push)(void *context);
    int (*context_pop)(void **context);
    int (*context_current)(void **context);
    int (*context_device)(int *device);
    int (*library_load)(void **library, const void *image, void *jit_options, void **jit_values, unsigned jit_count,
                        void *options, void **values, unsigned count);
    int (*library_kernel)(void **kernel, void *library, const char *name);
    int (*library_unload)(void *library);
    int (*kernel_set_attribute)(int attribute, int value, void *kernel, int device);
    int (*kernel_attribute)(int *value, int attribute, void *kernel, int device);
    int (*kernel_function)(void **function, void *kernel);
    int (*pointer_attribute)(void *data, int attribute, uint64_t address);
    int (*exchange_capture_mode)(int *mode);
    int (*function_load)(void *function);                                                  /* CUDA 12.4 */
    int (*kernel_parameter)(void *kernel, size_t index, size_t *offset, size_t *size);     /* CUDA 12.4 */
    int (*kernel_parameter_count)(void *kernel, size_t *count);                            /* CUDA 13.2 */
    int (*encode_tiled)(void *map, int type, unsigned rank, void *address, const uint64_t *sizes,
                        const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides, int interleave,
                        int swizzle, int promotion, int fill);
    LaunchFunction launch;
    LaunchCooperativeFunction launch_cooperative;
    int (*launch_configured)(const LaunchConfiguration *configuration, void *function, void **parameters, void **extra);
} CudaFunctions;

#define AT(member) offsetof(CudaFunctions, member)
static const Symbol SYMBOLS[] = {
    {"cuInit", AT(init), 0},
    {"cuDriverGetVersion", AT(driver_version), 0},
    {"cuDeviceGetCount", AT(device_count), 0},
    {"cuDeviceGet", AT(device_get), 0},
    {"cuGetErrorName", AT(error_name), 0},
    {"cuGetErrorString", AT(error_text), 0},
    {"cuDevicePrimaryCtxRetain", AT(context_retain), 0},
    {"cuDevicePrimaryCtxRelease_v2", AT(context_release), 0},
    {"cuCtxPushCurrent_v2", AT(context_push), 0},
    {"cuCtxPopCurrent_v2", AT(context_pop), 0},
    {"cuCtxGetCurrent", AT(context_current), 0},
    {"cuCtxGetDevice", AT(context_device), 0},
    {"cuLibraryLoadData", AT(library_load), 0},
    {"cuLibraryGetKernel", AT(library_kernel), 0},
    {"cuLibraryUnload", AT(library_unload), 0},
    {"cuKernelSetAttribute", AT(kernel_set_attribute), 0},
    {"cuKernelGetAttribute", AT(kernel_attribute), 0},
    {"cuKernelGetFunction", AT(kernel_function), 0},
    {"cuPointerGetAttribute", AT(pointer_attribute), 0},
    {"cuThreadExchangeStreamCaptureMode", AT(exchange_capture_mode), 0},
    {"cuFuncLoad", AT(function_load), 1},
    {"cuKernelGetParamInfo", AT(kernel_parameter), 1},
    {"cuKernelGetParamCount", AT(kernel_parameter_count), 1},
    {"cuTensorMapEncodeTiled", AT(encode_tiled), 0},
    {"cuLaunchKernel", AT(launch), 0},
    {"cuLaunchCooperativeKernel", AT(launch_cooperative), 0},
    {"cuLaunchKernelEx", AT(launch_configured), 0},
};

static const CudaFunctions *cuda_functions(const DriverLibrary *driver) { return driver->functions; }

static Outcome outcome(const char *call, int code) { return code == 0 ? SUCCEEDED : (Outcome){call, code}; }

/* ---- Driver and devices ---- */

static Outcome cuda_start(DriverLibrary *driver) {
    const CudaFunctions *cuda = cuda_functions(driver);
    int code = cuda->init(0);
    if (code != 0) return outcome("cuInit", code);
    code = cuda->driver_version(&driver->version);
    if (code != 0) return outcome("cuDriverGetVersion", code);
    return outcome("cuDeviceGetCount", cuda->device_count(&driver->device_count));
}

static Outcome cuda_list_devices(DriverLibrary *driver) {
    for (int i = 0; i < driver->device_count; i++) {
        int code = cuda_functions(driver)->device_get(&driver->devices[i].handle, i);
        if (code != 0) return outcome("cuDeviceGet", code);
    }
    return SUCCEEDED;
}

/* The framework holds primary contexts of its own: releasing ours destroys nothing that is in use. */
static void cuda_stop(DriverLibrary *driver) {
    for (int i = 0; i < driver->device_count; i++) {
        if (atomic_load(&driver->devices[i].context) != NULL)
            cuda_functions(driver)->context_release(driver->devices[i].handle);
    }
}

static Outcome retain_context(DriverLibrary *driver, int device) {
    Device *gpu = &driver->devices[device];
    Outcome result = SUCCEEDED;
    pthread_mutex_lock(&driver->retaining);
    if (atomic_load(&gpu->context) == NULL) {
        void *context = NULL;
        result = outcome("cuDevicePrimaryCtxRetain", cuda_functions(driver)->context_retain(&context, gpu->handle));
        if (result.call == NULL) atomic_store_explicit(&gpu->context, context, memory_order_release);
    }
    pthread_mutex_unlock(&driver->retaining);
    return result;
}

static Outcome push_context(const DriverLibrary *driver, int device) {
    void *context = atomic_load_explicit(&driver->devices[device].context, memory_order_acquire);
    return outcome("cuCtxPushCurrent", cuda_functions(driver)->context_push(context));
}

/* Undoes push_context; an earlier failure is the one worth telling. */
static Outcome pop_context(const DriverLibrary *driver, Outcome so_far) {
    void *popped;
    Outcome result = outcome("cuCtxPopCurrent", cuda_functions(driver)->context_pop(&popped));
    return so_far.call != NULL ? so_far : result;
}

/* ---- Kernels ---- */

/* A capture forbids its thread, or all threads, whatever may not be captured; loading code is none of it, and is allowed
 * to a thread that says so. Twice undoes it. */
static void exchange_capture_mode(const DriverLibrary *driver, const Code *code, int *mode) {
    if (code->any_time) (void)cuda_functions(driver)->exchange_capture_mode(mode);
}

/* The driver copies the image, and a library handle belongs to no context. */
static Outcome cuda_load(const DriverLibrary *driver, Code *code) {
    const CudaFunctions *cuda = cuda_functions(driver);
    int mode = CAPTURE_MODE_RELAXED;
    exchange_capture_mode(driver, code, &mode);
    int result = cuda->library_load(&code->library, code->image, NULL, NULL, 0, NULL, NULL, 0);
    exchange_capture_mode(driver, code, &mode);
    if (result != 0) return outcome("cuLibraryLoadData", result);
    return outcome("cuLibraryGetKernel", cuda->library_kernel(&code->kernel, code->library, code->name));
}

/* The driver loads kernels lazily, which would break a stream capture: asking for the function here loads it. */
static Outcome load_function(const DriverLibrary *driver, const Code *code) {
    const CudaFunctions *cuda = cuda_functions(driver);
    void *function = NULL;
    int result = cuda->kernel_function(&function, code->kernel);
    if (result != 0) return outcome("cuKernelGetFunction", result);
    if (cuda->function_load == NULL) return SUCCEEDED;
    return outcome("cuFuncLoad", cuda->function_load(function));
}

static Outcome set_attribute(const DriverLibrary *driver, void *kernel, int device, int attribute, int value) {
    return outcome("cuKernelSetAttribute", cuda_functions(driver)->kernel_set_attribute(attribute, value, kernel,
                                                                                        driver->devices[device].handle));
}

static Outcome cuda_prepare(DriverLibrary *driver, Code *code, int device) {
    Outcome result = SUCCEEDED;
    int mode = CAPTURE_MODE_RELAXED;
    if (code->shared > SHARED_WITHOUT_OPT_IN)
        result = set_attribute(driver, code->kernel, device, MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)code->shared);
    if (result.call != NULL) return result;
    result = retain_context(driver, device);
    if (result.call != NULL) return result;
    result = push_context(driver, device);
    if (result.call != NULL) return result;
    exchange_capture_mode(driver, code, &mode);
    result = load_function(driver, code);
    exchange_capture_mode(driver, code, &mode);
    result = pop_context(driver, result);
    /* What is launched is the kernel, not the function: it is right in any context of the device. */
    if (result.call == NULL)
        atomic_store_explicit(&code->devices[device].function, code->kernel, memory_order_release);
    return result;
}

enum { ATTRIBUTES = 4 }; /* CUlaunchAttribute: as many as a launch can have */

/* Writes those of a launch; how many. */
static unsigned set_attributes(const DriverLibrary *driver, const Code *code, LaunchAttribute *attributes) {
    enum { COOPERATIVE = 2, CLUSTER_DIMENSION = 4, CLUSTER_SCHEDULING = 5, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
    enum { SPREAD = 1 }; /* the blocks of a cluster over multiprocessors */
    unsigned count = 0;
    /* The kernel may start once every block of the one before it has said that it may, or ended. One that waits for the
     * kernel before it is right without the attribute, too. */
    if (code->pdl && driver->version >= PDL_IN_GRAPHS)
        attributes[count++] = (LaunchAttribute){.id = PROGRAMMATIC_STREAM_SERIALIZATION, .value.flag = 1};
    if (code->cooperative) attributes[count++] = (LaunchAttribute){.id = COOPERATIVE, .value.flag = 1};
    if (code->cluster > 1) {
        attributes[count++] =
            (LaunchAttribute){.id = CLUSTER_DIMENSION, .value.dimensions = {(unsigned)code->cluster, 1, 1}};
        attributes[count++] = (LaunchAttribute){.id = CLUSTER_SCHEDULING, .value.flag = SPREAD};
    }
    return count;
}

static Outcome launch_here(const DriverLibrary *driver, const Code *code, int device, const Launch *launch) {
    const CudaFunctions *cuda = cuda_functions(driver);
    LaunchAttribute attributes[ATTRIBUTES];
    if (code->cooperative && !code->pdl && code->cluster <= 1)
        return outcome("cuLaunchCooperativeKernel", call_launch_cooperative(cuda->launch_cooperative, code, launch));
    unsigned count = set_attributes(driver, code, attributes);
    if (code->cluster > PORTABLE_CLUSTER) {
        Outcome allowed = set_attribute(driver, launch->function, device, NON_PORTABLE_CLUSTER, 1);
        if (allowed.call != NULL) return allowed;
    }
    if (count == 0) return outcome("cuLaunchKernel", call_launch(cuda->launch, code, launch));
    LaunchConfiguration configuration = {
        .grid = {launch->grid[0], launch->grid[1], launch->grid[2]},
        .block = {code->threads, 1, 1},
        .shared = code->shared,
        .stream = launch->stream,
        .attributes = attributes,
        .attribute_count = count,
    };
    return outcome("cuLaunchKernelEx",
                   cuda->launch_configured(&configuration, launch->function, launch->parameters, NULL));
}

/* Whether a context of the device is current: the one that frameworks share, or another. A thread that has not used the
 * GPU yet has none, and cuCtxGetDevice is an error there, which compute-sanitizer reports: the first time, a thread asks
 * whether it has one. */
static Outcome find_current(const DriverLibrary *driver, int device, int *is_current) {
    static _Thread_local int had_context = 0;
    const CudaFunctions *cuda = cuda_functions(driver);
    int handle = -1;
    if (!had_context) {
        void *context = NULL;
        int result = cuda->context_current(&context);
        if (result != 0) return outcome("cuCtxGetCurrent", result);
        if (context == NULL) return SUCCEEDED;
        had_context = 1;
    }
    int result = cuda->context_device(&handle);
    if (result == INVALID_CONTEXT) return SUCCEEDED;
    *is_current = handle == driver->devices[device].handle;
    return outcome("cuCtxGetDevice", result);
}

static Outcome cuda_launch(const DriverLibrary *driver, const Code *code, int device, const Launch *launch) {
    int is_current = 0;
    Outcome found = find_current(driver, device, &is_current);
    if (found.call != NULL) return found;
    if (is_current) return launch_here(driver, code, device, launch);

    Outcome pushed = push_context(driver, device);
    if (pushed.call != NULL) return pushed;
    return pop_context(driver, launch_here(driver, code, device, launch));
}

static Outcome cuda_unload(const DriverLibrary *driver, Code *code) {
    if (code->library == NULL) return SUCCEEDED;
    return outcome("cuLibraryUnload", cuda_functions(driver)->library_unload(code->library));
}

static Outcome cuda_facts(const DriverLibrary *driver, const Code *code, int device, KernelFacts *facts) {
    const struct {
        int attribute;
        int *value;
    } asked[] = {{NUM_REGS, &facts->registers},
                 {LOCAL_SIZE_BYTES, &facts->local_bytes},
                 {MAX_THREADS_PER_BLOCK, &facts->max_threads}};
    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        int result = cuda_functions(driver)->kernel_attribute(asked[i].value, asked[i].attribute, code->kernel,
                                                              driver->devices[device].handle);
        if (result != 0) return outcome("cuKernelGetAttribute", result);
    }
    return SUCCEEDED;
}

/* Memory of the host that was not registered is an invalid value to the driver. */
static Outcome cuda_find_memory(const DriverLibrary *driver, void *address, void **accessible) {
    uint64_t found = 0;
    int result = cuda_functions(driver)->pointer_attribute(&found, POINTER_DEVICE_POINTER, (uint64_t)(uintptr_t)address);
    *accessible = result == 0 ? (void *)(uintptr_t)found : NULL;
    return result == INVALID_VALUE ? SUCCEEDED : outcome("cuPointerGetAttribute", result);
}

/* An index past the last parameter is an invalid value to the driver. Other failures say nothing of the kernel. */
static int read_parameters(const CudaFunctions *cuda, const Code *code, size_t most, size_t *sizes, size_t *count) {
    if (cuda->kernel_parameter_count == NULL || cuda->kernel_parameter_count(code->kernel, count) != 0) *count = most;
    for (size_t i = 0; i < most && i < *count; i++) {
        size_t offset;
        int result = cuda->kernel_parameter(code->kernel, i, &offset, &sizes[i]);
        if (result == INVALID_VALUE) *count = i;
        else if (result != 0) return 0;
    }
    return 1;
}

/* The driver answers where a context is current, whichever; a thread may have none, and then one of ours does. */
static int push_any_context(const DriverLibrary *driver) {
    for (int i = 0; i < driver->device_count; i++) {
        void *context = atomic_load_explicit(&driver->devices[i].context, memory_order_acquire);
        if (context != NULL) return cuda_functions(driver)->context_push(context) == 0;
    }
    return 0;
}

static int cuda_parameters(const DriverLibrary *driver, const Code *code, size_t most, size_t *sizes, size_t *count) {
    const CudaFunctions *cuda = cuda_functions(driver);
    void *context = NULL;
    if (cuda->kernel_parameter == NULL || cuda->context_current(&context) != 0) return 0;
    if (context != NULL) return read_parameters(cuda, code, most, sizes, count);
    if (!push_any_context(driver)) return 0;
    int known = read_parameters(cuda, code, most, sizes, count);
    cuda->context_pop(&context);
    return known;
}

/* Lines are fetched into L2 by 128 bytes. */
static Outcome cuda_encode(const DriverLibrary *driver, const TensorMapRequest *request, void *map) {
    enum { NO_INTERLEAVE, PROMOTE_128_BYTES = 2, FILL_ZERO = 0, FILL_NAN = 1 };
    static const uint32_t every_element[TENSOR_MAP_MAX_RANK] = {1, 1, 1, 1, 1};
    int code = cuda_functions(driver)->encode_tiled(map, request->type, request->rank, request->address, request->sizes,
                                                    request->strides, request->box, every_element, NO_INTERLEAVE,
                                                    request->swizzle, PROMOTE_128_BYTES,
                                                    request->fill_nan ? FILL_NAN : FILL_ZERO);
    return outcome("cuTensorMapEncodeTiled", code);
}

/* ---- Errors ---- */

static void cuda_describe(const DriverLibrary *driver, int code, const char **name, const char **text) {
    const CudaFunctions *cuda = cuda_functions(driver);
    if (cuda->error_name(code, name) != 0 || *name == NULL) *name = "unknown error";
    if (cuda->error_text(code, text) != 0 || *text == NULL) *text = "the driver has no text for it";
}

const Backend cuda_backend = {
    .name = "cuda",
    .symbols = SYMBOLS,
    .symbol_count = sizeof SYMBOLS / sizeof SYMBOLS[0],
    .functions_size = sizeof(CudaFunctions),
    .already_deinitialized = DEINITIALIZED,
    .start = cuda_start,
    .list_devices = cuda_list_devices,
    .stop = cuda_stop,
    .load = cuda_load,
    .prepare = cuda_prepare,
    .launch = cuda_launch,
    .unload = cuda_unload,
    .facts = cuda_facts,
    .find_memory = cuda_find_memory,
    .parameters = cuda_parameters,
    .encode = cuda_encode,
    .describe = cuda_describe,
};
