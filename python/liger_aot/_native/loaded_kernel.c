/* What the types Kernel and Binary have in common: an image, loaded, prepared on devices and unloaded. */
#include "loaded_kernel.h"

#include <stdio.h>
#include <string.h>

const char *text_of(PyObject *string, const char *what) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(string, &size);
    if (text == NULL || strlen(text) == (size_t)size) return text;
    PyErr_Format(PyExc_ValueError, "%s %R has a null character", what, string);
    return NULL;
}

void loaded_kernel_init(LoadedKernel *self, DriverObject *driver) {
    pthread_mutex_init(&self->code.preparing, NULL); /* default attributes: cannot fail on Linux */
    Py_INCREF(driver);
    self->driver = driver;
}

int loaded_kernel_set(LoadedKernel *self, PyObject *image, PyObject *name) {
    self->code.name = text_of(name, "name");
    if (self->code.name == NULL) return -1;
    self->code.image = PyBytes_AsString(image); /* followed by a NUL, which marks the end of PTX */
    if (self->code.image == NULL) return -1;
    Py_INCREF(image);
    self->image = image;
    Py_INCREF(name);
    self->name = name;
    return 0;
}

void raise_kernel_error(const LoadedKernel *self, Outcome outcome, const char *doing) {
    char text[512], threads[32] = "";
    if (self->code.threads != 0) snprintf(threads, sizeof threads, "%u threads, ", self->code.threads);
    snprintf(text, sizeof text, "%s (kernel %.200s: %s%u bytes of shared memory)", doing, self->code.name, threads,
             self->code.shared);
    raise_driver_error(self->driver, outcome, text);
}

int loaded_kernel_load(LoadedKernel *self) {
    Outcome outcome;
    if (check_not_forked(self->driver) < 0) return -1;
    Py_BEGIN_ALLOW_THREADS
    outcome = code_load(&self->driver->library, &self->code);
    Py_END_ALLOW_THREADS
    if (outcome.call != NULL) {
        raise_kernel_error(self, outcome, "loading the image");
        return -1;
    }
    if (self->code.library != NULL) { /* the driver has a copy, which serves all devices */
        self->code.image = NULL;
        Py_CLEAR(self->image);
    }
    return 0;
}

/* Loading can take long: other threads run meanwhile. */
int loaded_kernel_prepare(LoadedKernel *self, int device) {
    char doing[64];
    Outcome outcome;
    if (code_is_ready(&self->code, device)) return 0;
    Py_BEGIN_ALLOW_THREADS
    outcome = code_prepare(&self->driver->library, &self->code, device);
    Py_END_ALLOW_THREADS
    if (outcome.call == NULL) return 0;
    snprintf(doing, sizeof doing, "preparing device %d", device);
    raise_kernel_error(self, outcome, doing);
    return -1;
}

/* Unloading may wait for the device, and a callback there may wait for the GIL. */
static void unload(LoadedKernel *self) {
    Outcome outcome;
    const Backend *backend = self->driver->library.backend;
    int release = driver_is_to_be_released(self->driver);
    Py_BEGIN_ALLOW_THREADS
    outcome = code_unload(&self->driver->library, &self->code, release);
    Py_END_ALLOW_THREADS
    if (outcome.call == NULL || outcome.code == backend->already_deinitialized) return;
    raise_kernel_error(self, outcome, "unloading");
    PyErr_WriteUnraisable(self->name);
}

void loaded_kernel_free(LoadedKernel *self) {
    PyObject *error_type, *error, *traceback;
    PyErr_Fetch(&error_type, &error, &traceback);
    unload(self);
    PyErr_Restore(error_type, error, traceback);
    pthread_mutex_destroy(&self->code.preparing);
    Py_XDECREF(self->image);
    Py_XDECREF(self->name);
    Py_DECREF(self->driver);
}
