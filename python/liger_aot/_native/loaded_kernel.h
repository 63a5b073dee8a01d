/* A kernel of an image that a driver has loaded: what the types Kernel and Binary have in common. */
#ifndef LIGER_AOT_LOADED_KERNEL_H
#define LIGER_AOT_LOADED_KERNEL_H

#include "module.h"

#pragma GCC visibility push(hidden)

typedef struct {
    DriverObject *driver;
    PyObject *name;
    PyObject *image; /* HIP reads it when a device first needs it; NULL once CUDA has its copy */
    Code code;       /* threads: 0 where the caller launches it and knows them */
} LoadedKernel;

/* The text of a string, which lives as long as that; NULL with an error set, also for a NUL inside. */
const char *text_of(PyObject *string, const char *what);

/* Of a new object, all zero: from here on loaded_kernel_free frees it. */
void loaded_kernel_init(LoadedKernel *self, DriverObject *driver);

/* Keeps a bytes object and the kernel's name in it. Returns 0, or -1 with an error set. */
int loaded_kernel_set(LoadedKernel *self, PyObject *image, PyObject *name);

/* Loads the image as far as that needs no device. Returns 0, or -1 with an error set. */
int loaded_kernel_load(LoadedKernel *self);

/* Makes the kernel ready on a device, once. Returns 0, or -1 with an error set. */
int loaded_kernel_prepare(LoadedKernel *self, int device);

/* Unloads it; an error that is on its way stays. */
void loaded_kernel_free(LoadedKernel *self);

/* Sets the error of a failed outcome, with the kernel and what it was asked to do. */
void raise_kernel_error(const LoadedKernel *self, Outcome outcome, const char *doing);

#pragma GCC visibility pop
#endif
