/* The HIP runtime's module API. A module belongs to the device that was current when it was loaded. */
#include "driver.h"

#define DEINITIALIZED 4
#define INVALID_VALUE 1
enum { MAX_THREADS_PER_BLOCK = 0, LOCAL_SIZE_BYTES = 3, NUM_REGS = 4 }; /* hipFunction_attribute */
enum { POINTER_DEVICE_POINTER = 3 };                                    /* hipPointer_attribute */
enum { CAPTURE_MODE_RELAXED = 2 };

typedef struct {
    int (*init)(unsigned flags);
    int (*runtime_version)(int *version);
    int (*device_count)(int *count);
    int (*get_device)(int *device);
    int (*set_device)(int device);
    const char *(*error_name)(int code);
    const char *(*error_text)(int code);
    int (*last_error)(void);
    int (*module_load)(void **module, const void *image);
    int (*module_function)(void **function, void *module, const char *name);
    int (*module_unload)(void *module);
    int (*function_attribute)(int *value, int attribute, const void *function);
    int (*pointer_attribute)(void *data, int attribute, void *address);
    int (*exchange_capture_mode)(int *mode);
    LaunchFunction launch;
    LaunchCooperativeFunction launch_cooperative;
} HipFunctions;

#define AT(member) offsetof(HipFunctions, member)
static const Symbol SYMBOLS[] = {
    {"hipInit", AT(init), 0},
    {"hipRuntimeGetVersion", AT(runtime_version), 0},
    {"hipGetDeviceCount", AT(device_count), 0},
    {"hipGetDevice", AT(get_device), 0},
    {"hipSetDevice", AT(set_device), 0},
    {"hipGetErrorName", AT(error_name), 0},
    {"hipGetErrorString", AT(error_text), 0},
    {"hipGetLastError", AT(last_error), 0},
    {"hipModuleLoadData", AT(module_load), 0},
    {"hipModuleGetFunction", AT(module_function), 0},
    {"hipModuleUnload", AT(module_unload), 0},
    {"hipFuncGetAttribute", AT(function_attribute), 1},
    {"hipPointerGetAttribute", AT(pointer_attribute), 1},
    {"hipThreadExchangeStreamCaptureMode", AT(exchange_capture_mode), 1},
    {"hipModuleLaunchKernel", AT(launch), 0},
    {"hipModuleLaunchCooperativeKernel", AT(launch_cooperative), 0},
};

static const HipFunctions *hip_functions(const DriverLibrary *driver) { return driver->functions; }

/* HIP remembers the last error of the thread, and the framework would report it as its own: take it away. */
static Outcome outcome(const HipFunctions *hip, const char *call, int code) {
    if (code == 0) return SUCCEEDED;
    (void)hip->last_error();
    return (Outcome){call, code};
}

/* ---- Driver and devices ---- */

static Outcome hip_start(DriverLibrary *driver) {
    const HipFunctions *hip = hip_functions(driver);
    Outcome result = outcome(hip, "hipInit", hip->init(0));
    if (result.call != NULL) return result;
    result = outcome(hip, "hipRuntimeGetVersion", hip->runtime_version(&driver->version));
    if (result.call != NULL) return result;
    return outcome(hip, "hipGetDeviceCount", hip->device_count(&driver->device_count));
}

static Outcome hip_list_devices(DriverLibrary *driver) {
    for (int i = 0; i < driver->device_count; i++) driver->devices[i].handle = i;
    return SUCCEEDED;
}

static void hip_stop(DriverLibrary *driver) { (void)driver; /* HIP retains primary contexts by itself. */ }

/* Makes `device` current and says which one was. */
static Outcome enter_device(const HipFunctions *hip, int device, int *previous) {
    Outcome result = outcome(hip, "hipGetDevice", hip->get_device(previous));
    if (result.call != NULL || *previous == device) return result;
    return outcome(hip, "hipSetDevice", hip->set_device(device));
}

/* Undoes enter_device; an earlier failure is the one worth telling. */
static Outcome leave_device(const HipFunctions *hip, int device, int previous, Outcome so_far) {
    if (previous == device) return so_far;
    Outcome result = outcome(hip, "hipSetDevice", hip->set_device(previous));
    return so_far.call != NULL ? so_far : result;
}

/* ---- Kernels ---- */

static Outcome hip_load(const DriverLibrary *driver, Code *code) {
    (void)driver;
    (void)code; /* Everything waits for a device. */
    return SUCCEEDED;
}

static Outcome load_module(const HipFunctions *hip, Code *code, DeviceCode *place) {
    void *function = NULL;
    if (place->module == NULL) {
        Outcome loaded = outcome(hip, "hipModuleLoadData", hip->module_load(&place->module, code->image));
        if (loaded.call != NULL) {
            place->module = NULL;
            return loaded;
        }
    }
    Outcome found =
        outcome(hip, "hipModuleGetFunction", hip->module_function(&function, place->module, code->name));
    if (found.call == NULL) atomic_store_explicit(&place->function, function, memory_order_release);
    return found;
}

static Outcome hip_prepare(DriverLibrary *driver, Code *code, int device) {
    const HipFunctions *hip = hip_functions(driver);
    int previous, mode = CAPTURE_MODE_RELAXED;
    Outcome result = enter_device(hip, device, &previous);
    if (result.call != NULL) return result;
    int relax = code->any_time && hip->exchange_capture_mode != NULL;
    if (relax) (void)hip->exchange_capture_mode(&mode);
    result = load_module(hip, code, &code->devices[device]);
    if (relax) (void)hip->exchange_capture_mode(&mode);
    return leave_device(hip, device, previous, result);
}

static Outcome launch_here(const HipFunctions *hip, const Code *code, const Launch *launch) {
    if (code->cooperative)
        return outcome(hip, "hipModuleLaunchCooperativeKernel",
                       call_launch_cooperative(hip->launch_cooperative, code, launch));
    return outcome(hip, "hipModuleLaunchKernel", call_launch(hip->launch, code, launch));
}

static Outcome hip_launch(const DriverLibrary *driver, const Code *code, int device, const Launch *launch) {
    const HipFunctions *hip = hip_functions(driver);
    int previous;
    Outcome result = enter_device(hip, device, &previous);
    if (result.call != NULL) return result;
    return leave_device(hip, device, previous, launch_here(hip, code, launch));
}

/* A runtime that doesn't say leaves what no kernel exceeds. */
static Outcome hip_facts(const DriverLibrary *driver, const Code *code, int device, KernelFacts *facts) {
    const HipFunctions *hip = hip_functions(driver);
    void *function = code_function(code, device);
    *facts = (KernelFacts){.max_threads = 1024};
    if (hip->function_attribute == NULL) return SUCCEEDED;
    int result = hip->function_attribute(&facts->registers, NUM_REGS, function);
    if (result == 0) result = hip->function_attribute(&facts->local_bytes, LOCAL_SIZE_BYTES, function);
    if (result == 0) result = hip->function_attribute(&facts->max_threads, MAX_THREADS_PER_BLOCK, function);
    return outcome(hip, "hipFuncGetAttribute", result);
}

static Outcome hip_find_memory(const DriverLibrary *driver, void *address, void **accessible) {
    const HipFunctions *hip = hip_functions(driver);
    *accessible = address;
    if (hip->pointer_attribute == NULL) return SUCCEEDED;
    int code = hip->pointer_attribute(accessible, POINTER_DEVICE_POINTER, address);
    Outcome result = outcome(hip, "hipPointerGetAttribute", code);
    if (code == 0) return result;
    *accessible = NULL;
    return code == INVALID_VALUE ? SUCCEEDED : result;
}

/* Unloads from every device, also when one fails; the first failure is the one told. */
static Outcome hip_unload(const DriverLibrary *driver, Code *code) {
    const HipFunctions *hip = hip_functions(driver);
    Outcome first = SUCCEEDED;
    for (int device = 0; device < driver->device_count; device++) {
        if (code->devices[device].module == NULL) continue;
        int previous;
        Outcome result = enter_device(hip, device, &previous);
        if (result.call == NULL) {
            result = outcome(hip, "hipModuleUnload", hip->module_unload(code->devices[device].module));
            result = leave_device(hip, device, previous, result);
        }
        if (first.call == NULL) first = result;
    }
    return first;
}

/* ---- Errors ---- */

static void hip_describe(const DriverLibrary *driver, int code, const char **name, const char **text) {
    const HipFunctions *hip = hip_functions(driver);
    *name = hip->error_name(code);
    *text = hip->error_text(code);
    if (*name == NULL) *name = "unknown error";
    if (*text == NULL) *text = "the driver has no text for it";
}

const Backend hip_backend = {
    .name = "hip",
    .symbols = SYMBOLS,
    .symbol_count = sizeof SYMBOLS / sizeof SYMBOLS[0],
    .functions_size = sizeof(HipFunctions),
    .already_deinitialized = DEINITIALIZED,
    .start = hip_start,
    .list_devices = hip_list_devices,
    .stop = hip_stop,
    .load = hip_load,
    .prepare = hip_prepare,
    .launch = hip_launch,
    .unload = hip_unload,
    .facts = hip_facts,
    .find_memory = hip_find_memory,
    .describe = hip_describe,
};
