/* Opening a driver library and keeping track of where a kernel is ready: the same for CUDA and HIP. */
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char OUT_OF_MEMORY[] = "calloc";

/* ---- Forks ---- */

static atomic_int forks; /* of this process's line since the first driver was opened; any thread may read it */
static pthread_once_t counting = PTHREAD_ONCE_INIT;

static void count_fork(void) { atomic_fetch_add(&forks, 1); }

static void count_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

int driver_is_inherited(const DriverLibrary *driver) {
    return driver->forks != atomic_load_explicit(&forks, memory_order_relaxed);
}

/* ---- The library ---- */

/* Finds every symbol of the backend. The address is copied, since C has no cast from object to function pointer. */
static int find_symbols(DriverLibrary *driver, void *handle, const char *path, char *reason, size_t capacity) {
    for (size_t i = 0; i < driver->backend->symbol_count; i++) {
        const Symbol *symbol = &driver->backend->symbols[i];
        void *address = dlsym(handle, symbol->name);
        if (address == NULL && !symbol->optional) {
            snprintf(reason, capacity, "%s has no function %s: the driver is too old, or it is another library", path,
                     symbol->name);
            return -1;
        }
        memcpy((char *)driver->functions + symbol->offset, &address, sizeof address);
    }
    return 0;
}

int driver_open(DriverLibrary *driver, const Backend *backend, const char *path, char *reason, size_t capacity) {
    pthread_once(&counting, count_forks);
    driver->forks = atomic_load(&forks);
    driver->backend = backend;
    driver->functions = calloc(1, backend->functions_size);
    if (driver->functions == NULL) {
        snprintf(reason, capacity, "out of memory");
        return -1;
    }
    /* Never closed again: drivers start threads and exit handlers that must not lose their code. */
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        const char *text = dlerror();
        snprintf(reason, capacity, "%s", text != NULL ? text : "dlopen gave no reason");
        return -1;
    }
    return find_symbols(driver, handle, path, reason, capacity);
}

Outcome driver_start(DriverLibrary *driver) {
    Outcome outcome = driver->backend->start(driver);
    if (outcome.call != NULL) return outcome;
    driver->devices = calloc((size_t)driver->device_count + 1, sizeof *driver->devices);
    if (driver->devices == NULL) return (Outcome){OUT_OF_MEMORY, 0};
    return driver->backend->list_devices(driver);
}

void driver_close(DriverLibrary *driver, int release) {
    if (release && driver->devices != NULL) driver->backend->stop(driver);
    free(driver->devices);
    free(driver->functions);
    driver->devices = NULL;
    driver->functions = NULL;
}

/* ---- The code of one kernel ---- */

Outcome code_load(const DriverLibrary *driver, Code *code) {
    code->devices = calloc((size_t)driver->device_count + 1, sizeof *code->devices);
    if (code->devices == NULL) return (Outcome){OUT_OF_MEMORY, 0};
    return driver->backend->load(driver, code);
}

Outcome code_prepare(DriverLibrary *driver, Code *code, int device) {
    if (code_is_ready(code, device)) return SUCCEEDED;
    pthread_mutex_lock(&code->preparing);
    Outcome outcome = SUCCEEDED;
    if (!code_is_ready(code, device)) outcome = driver->backend->prepare(driver, code, device);
    pthread_mutex_unlock(&code->preparing);
    return outcome;
}

Outcome code_unload(const DriverLibrary *driver, Code *code, int release) {
    Outcome outcome = SUCCEEDED;
    if (release && code->devices != NULL) outcome = driver->backend->unload(driver, code);
    free(code->devices);
    code->devices = NULL;
    return outcome;
}
