/* Turning Python values into the parameters of a kernel launch. */
#ifndef LIGER_AOT_ARGUMENTS_H
#define LIGER_AOT_ARGUMENTS_H

#include "module.h"

#include <stdint.h>

#pragma GCC visibility push(hidden)

/* More than any kernel takes; a launch keeps its arguments on the stack. */
#define MAX_ARGUMENTS 64

/* One kernel parameter: the driver copies as many of these bytes as the parameter has, from the front. */
typedef union {
    uint64_t pointer;
    int32_t int32;
    int64_t int64;
    float float32;
} Slot;

/* The letters of a signature: one a parameter. */
enum { ARGUMENT_POINTER = 'p', ARGUMENT_INT32 = 'i', ARGUMENT_INT64 = 'l', ARGUMENT_FLOAT32 = 'f' };

/* Checks that `signature` has only these letters and not too many. Returns 0, or -1 with an error set. */
int check_signature(const char *signature);

/* Packs one value. Returns 0, or -1: then argument_error has what to tell. */
int pack_argument(char letter, PyObject *value, Slot *slot);

/* Sets the error for the value that pack_argument refused. Positions count from 1. */
void argument_error(PyObject *kernel_name, const char *signature, int index, PyObject *value);

/* What comes before a kernel's own arguments. Each returns 0, or -1 with an error set. */
int read_device(PyObject *value, int device_count, int *device);
int read_stream(PyObject *value, void **stream);
int read_grid(PyObject *const *values, const unsigned limits[3], unsigned grid[3]);

#pragma GCC visibility pop
#endif
