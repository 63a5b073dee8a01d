/* Turning Python values into the parameters of a kernel launch. */
#ifndef LIGER_AOT_ARGUMENTS_H
#define LIGER_AOT_ARGUMENTS_H

#include "module.h"

#include <stdint.h>

#pragma GCC visibility push(hidden)

/* More than any kernel takes; a launch keeps its arguments on the stack. An argument that is a tensor map is several
 * parameters: the map, its sizes, its strides. */
#define MAX_ARGUMENTS 64
#define MAX_PARAMETERS 256

/* One kernel parameter: the driver copies as many of these bytes as the parameter has, from the front. */
typedef union {
    uint64_t pointer;
    int32_t int32;
    int64_t int64;
    float float32;
} Slot;

/* The letters of a signature, one an argument. A digit is a tensor map of so many dimensions. */
enum { ARGUMENT_POINTER = 'p', ARGUMENT_INT32 = 'i', ARGUMENT_INT64 = 'l', ARGUMENT_FLOAT32 = 'f' };

static inline int map_rank(char letter) { return letter <= '9' ? letter - '0' : 0; }

/* Checks that `signature` has only these letters and not too many. Returns 0, or -1 with an error set. */
int check_signature(const char *signature);

/* Packs one value into a slot, or a tensor map from where it lies, and adds its parameters at `*end`, which moves on.
 * Returns 0, or -1: then argument_error has what to tell. */
int pack_argument(PyObject *map_type, char letter, PyObject *value, Slot *slot, void ***end);

/* Sets the error for the value that pack_argument refused. Positions count from 1. */
void argument_error(PyObject *kernel_name, const char *signature, int index, PyObject *value);

/* What comes before a kernel's own arguments. Each returns 0, or -1 with an error set. */
int read_stream(PyObject *value, void **stream);
int read_grid(PyObject *const *values, const unsigned limits[3], unsigned grid[3]);

#pragma GCC visibility pop
#endif
