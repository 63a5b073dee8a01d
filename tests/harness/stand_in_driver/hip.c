/* The stand-in's libamdhip64. A failure is also the thread's last error, until somebody asks for it. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>

#include <stddef.h>

static int hip_result(int code) {
    if (code != SUCCESS) last_error = code;
    return code;
}

#define HIP_ENTER()                                   \
    do {                                              \
        int code = note_call(__func__, hip_device);   \
        if (code != SUCCESS) return hip_result(code); \
    } while (0)

int hipInit(unsigned flags) {
    HIP_ENTER();
    return hip_result(flags == 0 ? SUCCESS : INVALID_VALUE);
}

int hipRuntimeGetVersion(int *version) {
    HIP_ENTER();
    *version = 60342134;
    return SUCCESS;
}

int hipGetDeviceCount(int *count) {
    HIP_ENTER();
    *count = DEVICES;
    return SUCCESS;
}

int hipGetDevice(int *device) {
    HIP_ENTER();
    *device = hip_device;
    return SUCCESS;
}

int hipSetDevice(int device) {
    HIP_ENTER();
    if (device < 0 || device >= DEVICES) return hip_result(INVALID_VALUE);
    hip_device = device;
    return SUCCESS;
}

int hipGetLastError(void) {
    int code = last_error;
    last_error = SUCCESS;
    return code;
}

const char *hipGetErrorName(int code) {
    const char *name = name_of(code, "hipError");
    return name != NULL ? name : "hipErrorUnknown";
}

const char *hipGetErrorString(int code) {
    return code == INVALID_IMAGE ? "device kernel image is invalid" : "unknown error";
}

int hipModuleLoadData(void **module, const void *image) {
    HIP_ENTER();
    if (check_capture() != SUCCESS) return hip_result(check_capture());
    return hip_result(load_image(module, image));
}

int hipModuleGetFunction(void **function, void *module, const char *name) {
    HIP_ENTER();
    return hip_result(find_kernel(function, module, name, hip_device));
}

int hipModuleUnload(void *module) {
    HIP_ENTER();
    return hip_result(unload(module));
}

static int hip_launch(void *function, const uint32_t dimensions[7], Way way, void *stream,
                      void **parameters) {
    Kernel *kernel = function;
    if (kernel == NULL || kernel->device != hip_device) return hip_result(INVALID_HANDLE);
    if ((uint64_t)dimensions[0] * dimensions[3] > UINT32_MAX) return hip_result(INVALID_VALUE);
    record_launch(kernel, dimensions, hip_device, way, stream, parameters);
    return SUCCESS;
}

int hipModuleLaunchKernel(LAUNCH_ARGUMENTS, void **extra) {
    HIP_ENTER();
    return extra != NULL ? hip_result(INVALID_VALUE) : hip_launch(kernel, DIMENSIONS, PLAIN, stream, parameters);
}

int hipModuleLaunchCooperativeKernel(LAUNCH_ARGUMENTS) {
    HIP_ENTER();
    return hip_launch(kernel, DIMENSIONS, COOPERATIVE, stream, parameters);
}

int hipThreadExchangeStreamCaptureMode(int *mode) {
    HIP_ENTER();
    int before = capture_mode;
    if (*mode < 0 || *mode > 2) return hip_result(INVALID_VALUE);
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

int hipFuncGetAttribute(int *value, int attribute, const void *function) {
    HIP_ENTER();
    *value = attribute == 4 ? 40 : attribute == 3 ? 16 : attribute == 0 ? 1024 : 0;
    return function == NULL ? hip_result(INVALID_HANDLE) : SUCCESS;
}

int hipPointerGetAttribute(uint64_t *data, int attribute, uint64_t address) {
    HIP_ENTER();
    if (attribute != 3 || is_unreachable(address)) return hip_result(INVALID_VALUE);
    *data = address;
    return SUCCESS;
}

/* By which Triton's own launchers find functions of the runtime. */
int hipGetProcAddress(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    (void)version;
    (void)flags;
    (void)status;
    Dl_info here;
    void *self = dladdr((void *)hipGetProcAddress, &here) ? dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    *function = self == NULL ? NULL : dlsym(self, symbol);
    return *function != NULL ? SUCCESS : NOT_FOUND;
}

/* ---- What Triton's own driver calls besides ---- */

int hipDriverGetVersion(int *version) { return hipRuntimeGetVersion(version); }

int hipModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void **values) {
    (void)count;
    (void)options;
    (void)values;
    return hipModuleLoadData(module, image);
}

/* Triton asks where these are; nobody calls them. */
int hipGetDeviceProperties(void *properties, int device) {
    (void)properties;
    (void)device;
    return hip_result(INVALID_VALUE);
}

int hipDrvLaunchKernelEx(const void *configuration, void *function, void **parameters, void **extra) {
    (void)configuration;
    (void)function;
    (void)parameters;
    (void)extra;
    return hip_result(INVALID_VALUE);
}
