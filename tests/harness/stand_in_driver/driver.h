/* A GPU driver without a GPU, for the tests of the launcher: the functions of libcuda and of libamdhip64 that it
 * calls, in one library. It checks its callers the way the real ones do, and keeps a record of what they ask.
 *
 * An image is a header ("\x7f" "ELF", or "//" for PTX) and the kernels in it with the sizes of their parameters:
 * "\x7f" "ELF copy=pp scale=pfl". Letters as in a signature, and b and h for one and two bytes; the two scratch pointers
 * follow by themselves.
 * `record.c` has what the two APIs share and the functions stand_in_*, by which tests set what the driver says and
 * read what it was asked. */
#ifndef STAND_IN_DRIVER_H
#define STAND_IN_DRIVER_H

#include <stdint.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    TIMED_OUT = 702,
    CAPTURE_UNSUPPORTED = 900,
};
enum { DEVICES = 2, NO_DEVICE = -1 };
enum { PLAIN = 0, COOPERATIVE = 1, FOLLOWING = 2, SPREAD = 4, CLUSTER = 256 }; /* CLUSTER times its blocks */
typedef int Way; /* of launching: the sum of these */

typedef struct {
    char name[64];
    char letters[128];
    int device; /* HIP: the device it was loaded on; CUDA: NO_DEVICE */
    int shared_limit[DEVICES];
} Kernel;

/* A loaded image; one kernel of it can be asked for. */
typedef struct {
    char text[512];
    Kernel kernel;
} Library;

/* How both APIs pass a launch. */
#define LAUNCH_ARGUMENTS                                                                                        \
    void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
        void *stream, void **parameters
#define DIMENSIONS ((const uint32_t[]){gx, gy, gz, bx, by, bz, shared})

/* The current context of a thread, and those below it. CUDA threads start with none, HIP threads with device 0. */
extern __thread int contexts[16];
extern __thread int context_depth;
extern __thread int hip_device;
/* Whether a graph is being captured, and what this thread says of calls that can't be captured: 2 is relaxed. */
extern int capturing;
extern __thread int capture_mode;
/* HIP's last error of a thread, until somebody asks for it. */
extern __thread int last_error;
/* How often each device's primary context is retained. */
extern int retained[DEVICES];

/* Notes a call as "name@device", and says whether it is one that shall fail. Without a log it does nothing. */
int note_call(const char *call, int device);

/* SUCCESS, unless a capture forbids what is not captured. */
int check_capture(void);

/* What the tests said: kernels reach no memory from `from` up to `to`. */
int is_unreachable(uint64_t address);

int load_image(void **library, const char *image);
int find_kernel(void **kernel, Library *library, const char *name, int device);
int unload(void *library);

/* Records a launch, copying each parameter's bytes, as a driver does before it returns. */
void record_launch(const Kernel *kernel, const uint32_t dimensions[7], int device, Way way, void *stream,
                   void **parameters);

/* "CUDA_ERROR_INVALID_IMAGE"; NULL for a code that this driver does not know. */
const char *name_of(int code, const char *prefix);

#endif
