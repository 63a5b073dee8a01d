/* The stand-in's libcuda. */
#include "driver.h"

#include <stddef.h>
#include <string.h>

/* A handle is not its ordinal, though in the real driver it is: nothing says that it must be. */
enum { FIRST_HANDLE = 100 };

#define ENTER(device)                           \
    do {                                        \
        int code = note_call(__func__, device); \
        if (code != SUCCESS) return code;       \
    } while (0)

int cuInit(unsigned flags) {
    ENTER(NO_DEVICE);
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}

int cuDriverGetVersion(int *version) {
    ENTER(NO_DEVICE);
    *version = VERSION;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    ENTER(NO_DEVICE);
    *count = DEVICES;
    return SUCCESS;
}

int cuDeviceGet(int *handle, int ordinal) {
    ENTER(ordinal);
    *handle = ordinal + FIRST_HANDLE;
    return SUCCESS;
}

int cuGetErrorName(int code, const char **name) {
    *name = name_of(code, "CUDA_ERROR_");
    return *name != NULL ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorString(int code, const char **text) {
    *text = NULL;
    if (code == INVALID_IMAGE) *text = "device kernel image is invalid";
    if (code == NOT_FOUND) *text = "named symbol not found";
    return *text != NULL ? SUCCESS : INVALID_VALUE;
}

int cuDevicePrimaryCtxRetain(void **context, int handle) {
    ENTER(handle - FIRST_HANDLE);
    __atomic_add_fetch(&retained[handle - FIRST_HANDLE], 1, __ATOMIC_SEQ_CST);
    *context = (void *)(uintptr_t)handle;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int handle) {
    ENTER(handle - FIRST_HANDLE);
    __atomic_sub_fetch(&retained[handle - FIRST_HANDLE], 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int cuCtxPushCurrent_v2(void *context) {
    ENTER((int)(uintptr_t)context - FIRST_HANDLE);
    contexts[++context_depth] = (int)(uintptr_t)context - FIRST_HANDLE;
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context) {
    ENTER(contexts[context_depth]);
    if (context_depth == 0) return INVALID_CONTEXT;
    *context = (void *)(uintptr_t)(contexts[context_depth--] + FIRST_HANDLE);
    return SUCCESS;
}

int cuCtxGetCurrent(void **context) {
    ENTER(contexts[context_depth]);
    int device = contexts[context_depth];
    *context = device == NO_DEVICE ? NULL : (void *)(uintptr_t)(device + FIRST_HANDLE);
    return SUCCESS;
}

int cuCtxGetDevice(int *handle) {
    ENTER(contexts[context_depth]);
    if (contexts[context_depth] == NO_DEVICE) return INVALID_CONTEXT;
    *handle = contexts[context_depth] + FIRST_HANDLE;
    return SUCCESS;
}

int cuLibraryLoadData(void **library, const void *image, void *jit_options, void **jit_values, unsigned jit_count,
                      void *options, void **values, unsigned count) {
    ENTER(NO_DEVICE);
    if (jit_options || jit_values || jit_count || options || values || count) return INVALID_VALUE;
    if (check_capture() != SUCCESS) return check_capture();
    return load_image(library, image);
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    ENTER(NO_DEVICE);
    return find_kernel(kernel, library, name, NO_DEVICE);
}

int cuLibraryUnload(void *library) {
    ENTER(NO_DEVICE);
    return unload(library);
}

int cuKernelSetAttribute(int attribute, int value, void *kernel, int handle) {
    ENTER(handle - FIRST_HANDLE);
    if (attribute == 14) return value == 1 ? SUCCESS : INVALID_VALUE;
    if (attribute != 8 || value > 227 * 1024) return INVALID_VALUE;
    ((Kernel *)kernel)->shared_limit[handle - FIRST_HANDLE] = value;
    return SUCCESS;
}

int cuKernelGetFunction(void **function, void *kernel) {
    ENTER(contexts[context_depth]);
    if (contexts[context_depth] == NO_DEVICE) return INVALID_CONTEXT;
    *function = (char *)kernel + 1;
    return SUCCESS;
}

int cuKernelGetParamInfo(void *kernel, size_t index, size_t *offset, size_t *size) {
    ENTER(contexts[context_depth]);
    if (contexts[context_depth] == NO_DEVICE) return INVALID_CONTEXT;
    enum { BLOCK = 0x210 }; /* where a GPU of 9.0 puts the parameters: a tensor map does not start at offset 0 */
    size_t end = 0, count = 0;
    for (const char *letter = ((Kernel *)kernel)->letters; *letter != 0; letter++) {
        int rank = *letter <= '9' ? *letter - '0' : 0; /* of a tensor map, which is followed by sizes and strides */
        for (int part = 0; part <= 2 * rank; part++, count++) {
            int is_map = rank > 0 && part == 0;
            *size = is_map ? 128 : rank > 0 ? (part <= rank ? 4 : 8) : *letter == 'i' || *letter == 'f' ? 4 : 8;
            size_t alignment = is_map ? 64 : *size;
            *offset = ((BLOCK + end + alignment - 1) & ~(alignment - 1)) - BLOCK;
            if (count == index) return SUCCESS;
            end = *offset + *size;
        }
    }
    return INVALID_VALUE;
}

int cuKernelGetParamCount(void *kernel, size_t *count) {
    ENTER(contexts[context_depth]);
    if (contexts[context_depth] == NO_DEVICE) return INVALID_CONTEXT;
    *count = 0;
    for (const char *letter = ((Kernel *)kernel)->letters; *letter != 0; letter++)
        *count += *letter <= '9' ? 1 + 2 * (size_t)(*letter - '0') : 1;
    return SUCCESS;
}

int cuFuncLoad(void *function) {
    ENTER(contexts[context_depth]);
    if (check_capture() != SUCCESS) return check_capture();
    return ((uintptr_t)function & 1) != 0 ? SUCCESS : INVALID_HANDLE;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(NO_DEVICE);
    int before = capture_mode;
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

/* Registers, local bytes and threads: numbers that tell them apart. */
static int attribute_of(int *value, int attribute) {
    *value = attribute == 4 ? 40 : attribute == 3 ? 16 : attribute == 0 ? 1024 : 0;
    return SUCCESS;
}

int cuKernelGetAttribute(int *value, int attribute, void *kernel, int handle) {
    ENTER(handle - FIRST_HANDLE);
    return kernel == NULL ? INVALID_HANDLE : attribute_of(value, attribute);
}

/* The host's memory is the device's, but where a test says otherwise. */
int cuPointerGetAttribute(uint64_t *data, int attribute, uint64_t address) {
    ENTER(NO_DEVICE);
    if (attribute != 3 || is_unreachable(address)) return INVALID_VALUE;
    *data = address;
    return SUCCESS;
}

/* ---- What Triton's own driver and launchers call ---- */

int cuModuleLoadData(void **module, const void *image) {
    ENTER(contexts[context_depth]);
    if (check_capture() != SUCCESS) return check_capture();
    return load_image(module, image);
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    ENTER(contexts[context_depth]);
    return find_kernel(function, module, name, NO_DEVICE);
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    ENTER(contexts[context_depth]);
    return function == NULL ? INVALID_HANDLE : attribute_of(value, attribute);
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
    ENTER(contexts[context_depth]);
    if (attribute == 14) return SUCCESS;
    if (attribute != 8) return INVALID_VALUE; /* newer drivers know more, and Triton 3.8 asks */
    ((Kernel *)function)->shared_limit[contexts[context_depth]] = value;
    return SUCCESS;
}

int cuFuncSetCacheConfig(void *function, int configuration) {
    ENTER(contexts[context_depth]);
    return function != NULL && configuration == 1 ? SUCCESS : INVALID_VALUE;
}

int cuDeviceGetAttribute(int *value, int attribute, int handle) {
    ENTER(NO_DEVICE); /* Triton takes an ordinal for a handle */
    (void)handle;
    *value = attribute == 97 || attribute == 81 ? 227 * 1024 : 1; /* shared memory of a block, and of a multiprocessor */
    return SUCCESS;
}

int cuCtxSetCurrent(void *context) {
    ENTER((int)(uintptr_t)context - FIRST_HANDLE);
    contexts[context_depth] = (int)(uintptr_t)context - FIRST_HANDLE;
    return SUCCESS;
}

/* A map of the stand-in is what it was asked for, as 64-bit numbers: type, rank, address, swizzle and fill, then for each
 * dimension size, box and stride. */
int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                           int interleave, int swizzle, int promotion, int fill) {
    ENTER(NO_DEVICE);
    if (((uintptr_t)map & 63) != 0 || ((uintptr_t)address & 15) != 0 || rank < 1 || rank > 5) return INVALID_VALUE;
    if (interleave != 0 || promotion != 2 || fill < 0 || fill > 1 || swizzle < 0 || swizzle > 3) return INVALID_VALUE;
    uint64_t *out = map;
    *out++ = (uint64_t)type | (uint64_t)rank << 32;
    *out++ = (uintptr_t)address;
    *out++ = (uint64_t)swizzle | (uint64_t)fill << 32;
    for (unsigned i = 0; i < rank; i++) {
        uint64_t stride = i == 0 ? 0 : strides[i - 1];
        if (sizes[i] == 0 || box[i] == 0 || box[i] > 256 || element_strides[i] != 1 || stride % 16 != 0)
            return INVALID_VALUE;
        if (i < 4) *out++ = sizes[i] | (uint64_t)box[i] << 32; /* of five dimensions the last has no room */
        if (i > 0) *out++ = stride;
    }
    while (out < map + 16) *out++ = 0;
    return SUCCESS;
}

static int cuda_launch(void *kernel_or_null, const uint32_t dimensions[7], Way way, void *stream,
                       void **parameters) {
    Kernel *kernel = kernel_or_null;
    int device = contexts[context_depth];
    if (kernel == NULL) return INVALID_HANDLE;
    if (device == NO_DEVICE) return INVALID_CONTEXT;
    if (dimensions[6] > 48 * 1024 && (int)dimensions[6] > kernel->shared_limit[device]) return INVALID_VALUE;
    record_launch(kernel, dimensions, device, way, stream, parameters);
    return SUCCESS;
}

int cuLaunchKernel(LAUNCH_ARGUMENTS, void **extra) {
    ENTER(contexts[context_depth]);
    return extra != NULL ? INVALID_VALUE : cuda_launch(kernel, DIMENSIONS, PLAIN, stream, parameters);
}

int cuLaunchCooperativeKernel(LAUNCH_ARGUMENTS) {
    ENTER(contexts[context_depth]);
    return cuda_launch(kernel, DIMENSIONS, COOPERATIVE, stream, parameters);
}

/* CUlaunchConfig and its attributes, read at the offsets that they have in cuda.h. */
int cuLaunchKernelEx(const void *configuration, void *kernel, void **parameters, void **extra) {
    ENTER(contexts[context_depth]);
    enum { COOPERATIVE_GRID = 2, CLUSTER_DIMENSION = 4, CLUSTER_SCHEDULING = 5, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
    uint32_t dimensions[7], count, attribute[18];
    void *stream, *attributes;
    Way way = PLAIN;
    memcpy(dimensions, configuration, 28);
    memcpy(&stream, (const char *)configuration + 32, 8);
    memcpy(&attributes, (const char *)configuration + 40, 8);
    memcpy(&count, (const char *)configuration + 48, 4);
    if (extra != NULL || count > 4) return INVALID_VALUE;
    for (uint32_t i = 0; i < count; i++) {
        memcpy(attribute, (const char *)attributes + 72 * i, 72);
        const uint32_t *value = attribute + 2;
        if (attribute[0] == CLUSTER_DIMENSION) {
            if (value[0] < 2 || value[1] != 1 || value[2] != 1 || dimensions[0] % value[0] != 0) return INVALID_VALUE;
            way += CLUSTER * (Way)value[0];
            continue;
        }
        if (value[0] != 1) return INVALID_VALUE;
        if (attribute[0] == PROGRAMMATIC_STREAM_SERIALIZATION) way += FOLLOWING;
        else if (attribute[0] == COOPERATIVE_GRID) way += COOPERATIVE;
        else if (attribute[0] == CLUSTER_SCHEDULING) way += SPREAD;
        else return INVALID_VALUE;
    }
    return cuda_launch(kernel, dimensions, way, stream, parameters);
}

int cuCtxSetLimit(int limit, uint64_t value) {
    ENTER(contexts[context_depth]);
    (void)limit;
    (void)value;
    return SUCCESS;
}

int cuCtxGetLimit(uint64_t *value, int limit) {
    ENTER(contexts[context_depth]);
    (void)limit;
    *value = 0;
    return SUCCESS;
}

int cuModuleUnload(void *module) {
    ENTER(contexts[context_depth]);
    return unload(module);
}

int cuStreamIsCapturing(void *stream, int *status) {
    ENTER(contexts[context_depth]);
    (void)stream;
    *status = capturing;
    return SUCCESS;
}
