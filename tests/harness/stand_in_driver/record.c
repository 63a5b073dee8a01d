/* What both halves of the stand-in share: images, the record of calls and launches, and the tests' controls. */
#include "driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_LAUNCHES = 8192, MAX_BYTES = 1024, MAX_LOG = 1 << 20, LONGEST_LINE = 80 };

/* One launch; the tests read this layout through ctypes. */
typedef struct {
    char name[64];
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared;
    int32_t device;
    int32_t way;
    int32_t byte_count;
    uint64_t stream;
    uint8_t bytes[MAX_BYTES];
} LaunchRecord;

__thread int contexts[16] = {NO_DEVICE};
__thread int context_depth;
__thread int hip_device;
__thread int last_error;
int retained[DEVICES];
int capturing;
__thread int capture_mode;
static uint64_t unreachable_from, unreachable_to;

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static LaunchRecord launches[MAX_LAUNCHES];
static long launch_count;
static char call_log[MAX_LOG];
static size_t log_length;
static int logging = 1;
static int live_libraries;
static char failing_call[64];
static int failing_code;
static char held_call[64];

/* ---- For the tests ---- */

void stand_in_reset(void) {
    pthread_mutex_lock(&guard);
    launch_count = 0;
    call_log[0] = 0;
    log_length = 0;
    logging = 1;
    failing_call[0] = 0;
    held_call[0] = 0;
    capturing = 0;
    unreachable_from = unreachable_to = 0;
    pthread_mutex_unlock(&guard);
    last_error = 0;
    context_depth = 0;
    contexts[0] = 0;
    hip_device = 0;
}

void stand_in_set_current(int device) {
    contexts[context_depth] = device;
    hip_device = device < 0 ? 0 : device;
}

void stand_in_fail(const char *call, int code) {
    snprintf(failing_call, sizeof failing_call, "%s", call);
    failing_code = code;
}

/* Makes a call wait until it is no longer held ("" holds none); it gives up after ten minutes: no test is so slow. */
void stand_in_hold(const char *call) {
    pthread_mutex_lock(&guard);
    snprintf(held_call, sizeof held_call, "%s", call);
    pthread_mutex_unlock(&guard);
}

void stand_in_capture(int on) { capturing = on; }

void stand_in_unreachable(uint64_t from, uint64_t to) {
    unreachable_from = from;
    unreachable_to = to;
}

void stand_in_log_calls(int on) { logging = on; }
int stand_in_current(void) { return contexts[context_depth]; }
int stand_in_context_depth(void) { return context_depth; }
int stand_in_hip_device(void) { return hip_device; }
int stand_in_live_libraries(void) { return live_libraries; }
int stand_in_last_error(void) { return last_error; }
int stand_in_retained(int device) { return retained[device]; }
const char *stand_in_log(void) { return call_log; }
long stand_in_launch_count(void) { return launch_count; }
const LaunchRecord *stand_in_launch(long index) { return &launches[index % MAX_LAUNCHES]; }

/* After the interpreter is gone, which is when a test can see whether it gave anything back on its way out. */
__attribute__((destructor)) static void report_at_exit(void) {
    if (getenv("STAND_IN_REPORT") != NULL) printf("live libraries %d\n", live_libraries);
}

/* ---- Calls ---- */

static int is_held(const char *call) {
    pthread_mutex_lock(&guard);
    int held = strcmp(call, held_call) == 0;
    pthread_mutex_unlock(&guard);
    return held;
}

int note_call(const char *call, int device) {
    if (!logging) return SUCCESS;
    pthread_mutex_lock(&guard);
    if (log_length < MAX_LOG - LONGEST_LINE)
        log_length += (size_t)snprintf(call_log + log_length, LONGEST_LINE, "%s@%d\n", call, device);
    int code = strcmp(call, failing_call) == 0 ? failing_code : SUCCESS;
    pthread_mutex_unlock(&guard);
    for (int waited = 0; is_held(call); waited++) {
        if (waited == 600 * 1000) return TIMED_OUT;
        usleep(1000);
    }
    return code;
}

int check_capture(void) { return capturing && capture_mode != 2 ? CAPTURE_UNSUPPORTED : SUCCESS; }

int is_unreachable(uint64_t address) { return address >= unreachable_from && address < unreachable_to; }

/* ---- Images and kernels ---- */

int load_image(void **out, const char *image) {
    if (strncmp(image, "\x7f" "ELF ", 5) != 0 && strncmp(image, "// ", 3) != 0) return INVALID_IMAGE;
    Library *library = calloc(1, sizeof *library);
    snprintf(library->text, sizeof library->text, "%s", strchr(image, ' ') + 1);
    pthread_mutex_lock(&guard);
    live_libraries++;
    pthread_mutex_unlock(&guard);
    *out = library;
    return SUCCESS;
}

/* Finds "name=letters" among the words of the image. */
int find_kernel(void **out, Library *library, const char *name, int device) {
    char words[512], *rest = words, *word;
    snprintf(words, sizeof words, "%s", library->text);
    while ((word = strtok_r(rest, " \n", &rest)) != NULL) {
        char *letters = strchr(word, '=');
        if (letters == NULL) continue;
        *letters++ = 0;
        if (strcmp(word, name) != 0) continue;
        Kernel *kernel = &library->kernel;
        snprintf(kernel->name, sizeof kernel->name, "%s", name);
        snprintf(kernel->letters, sizeof kernel->letters, "%spp", letters);
        kernel->device = device;
        *out = kernel;
        return SUCCESS;
    }
    return NOT_FOUND;
}

int unload(void *library) {
    pthread_mutex_lock(&guard);
    live_libraries--;
    pthread_mutex_unlock(&guard);
    free(library);
    return SUCCESS;
}

/* ---- Launches ---- */

static void append(LaunchRecord *entry, const void *parameter, int size) {
    memcpy(entry->bytes + entry->byte_count, parameter, (size_t)size);
    entry->byte_count += size;
}

void record_launch(const Kernel *kernel, const uint32_t dimensions[7], int device, Way way, void *stream,
                   void **parameters) {
    pthread_mutex_lock(&guard);
    LaunchRecord *entry = &launches[launch_count++ % MAX_LAUNCHES];
    memcpy(entry->name, kernel->name, sizeof entry->name);
    memcpy(entry->grid, dimensions, sizeof entry->grid);
    memcpy(entry->block, dimensions + 3, sizeof entry->block);
    entry->shared = dimensions[6];
    entry->device = device;
    entry->way = way;
    entry->stream = (uint64_t)(uintptr_t)stream;
    entry->byte_count = 0;
    for (int i = 0; kernel->letters[i] != 0; i++) {
        int rank = kernel->letters[i] <= '9' ? kernel->letters[i] - '0' : 0; /* of a tensor map */
        char letter = kernel->letters[i];
        int size = letter == 'i' || letter == 'f' ? 4 : letter == 'b' ? 1 : letter == 'h' ? 2 : rank > 0 ? 128 : 8;
        append(entry, *parameters++, size);
        for (int j = 0; j < 2 * rank; j++) append(entry, *parameters++, j < rank ? 4 : 8);
    }
    pthread_mutex_unlock(&guard);
}

/* ---- Errors ---- */

const char *name_of(int code, const char *prefix) {
    static __thread char name[64];
    static const struct {
        int code;
        const char *name;
    } known[] = {{INVALID_VALUE, "INVALID_VALUE"},
                 {INVALID_IMAGE, "INVALID_IMAGE"},
                 {INVALID_HANDLE, "INVALID_HANDLE"},
                 {NOT_FOUND, "NOT_FOUND"},
                 {CAPTURE_UNSUPPORTED, "STREAM_CAPTURE_UNSUPPORTED"}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (known[i].code != code) continue;
        snprintf(name, sizeof name, "%s%s", prefix, known[i].name);
        return name;
    }
    return NULL;
}
