/* An allocator for torch (CUDAPluggableAllocator) whose allocations lie each between two unmapped ranges of addresses:
 * flush with the range behind, or with the one before where LIGER_AOT_GUARD=before. An access beyond a tensor then is an
 * illegal address for whatever makes it, TMA loads included, which compute-sanitizer does not check.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Address;

/* As in cuda.h: CUmemAllocationProp and CUmemAccessDesc. */
typedef struct {
    int type, requested_handles;
    struct { int type, id; } location;
    void *windows;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} Properties;
typedef struct { struct { int type, id; } location; int flags; } Access;

enum { PINNED = 1, DEVICE = 1, READ_AND_WRITE = 3, UNIT = 16 /* bytes: what TMA and 128-bit accesses need */ };

static int (*reserve)(Address *, size_t, size_t, Address, unsigned long long);
static int (*release_range)(Address, size_t);
static int (*create)(Address *, size_t, const Properties *, unsigned long long);
static int (*release)(Address);
static int (*map)(Address, size_t, size_t, Address, unsigned long long);
static int (*unmap)(Address, size_t);
static int (*allow)(Address, size_t, const Access *, size_t);
static int (*granularity)(size_t *, const Properties *, int);
static int (*synchronize)(void);
static int (*retain)(void **, int);
static int (*push)(void *);
static int (*pop)(void **);

static void *contexts[64]; /* torch's, by device: a thread of autograd that frees a tensor may have none */

static void check(int status, const char *what)
{
    if (status) {
        fprintf(stderr, "guard_pages: %s: CUDA error %d\n", what, status);
        abort();
    }
}

static void load(void)
{
    static const struct { const char *name; void *to; } functions[] = {
        {"cuMemAddressReserve", &reserve}, {"cuMemAddressFree", &release_range}, {"cuMemCreate", &create},
        {"cuMemRelease", &release}, {"cuMemMap", &map}, {"cuMemUnmap", &unmap}, {"cuMemSetAccess", &allow},
        {"cuMemGetAllocationGranularity", &granularity}, {"cuCtxSynchronize", &synchronize},
        {"cuDevicePrimaryCtxRetain", &retain}, {"cuCtxPushCurrent_v2", &push}, {"cuCtxPopCurrent_v2", &pop},
    };
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = cuda ? dlsym(cuda, functions[i].name) : NULL;
        check(found == NULL, functions[i].name);
        memcpy(functions[i].to, &found, sizeof found);
    }
}

static Properties on(int device)
{
    Properties p;
    memset(&p, 0, sizeof p);
    p.type = PINNED;
    p.location.type = DEVICE;
    p.location.id = device;
    return p;
}

/* Where the allocation of so many bytes lies in what is mapped, how much that is, and the unit of mapping. */
static size_t place(size_t size, int device, size_t *mapped, size_t *unit)
{
    Properties p = on(device);
    const char *side = getenv("LIGER_AOT_GUARD");
    if (reserve == NULL)
        load();
    check(granularity(unit, &p, 0), "cuMemGetAllocationGranularity");
    *mapped = (size + *unit - 1) / *unit * *unit;
    if (side && strcmp(side, "before") == 0)
        return 0;
    return *mapped - (size + UNIT - 1) / UNIT * UNIT;
}

void *guarded_malloc(size_t size, int device, void *stream)
{
    size_t mapped, unit, at = place(size, device, &mapped, &unit);
    Address base, memory;
    Properties p = on(device);
    Access access = {{DEVICE, device}, READ_AND_WRITE};
    (void)stream;
    if (size == 0)
        return NULL;
    if (contexts[device] == NULL)
        check(retain(&contexts[device], device), "cuDevicePrimaryCtxRetain");
    check(reserve(&base, mapped + 2 * unit, 0, 0, 0), "cuMemAddressReserve");
    check(create(&memory, mapped, &p, 0), "cuMemCreate");
    check(map(base + unit, mapped, 0, memory, 0), "cuMemMap");
    check(release(memory), "cuMemRelease"); /* it stays until it is unmapped */
    check(allow(base + unit, mapped, &access, 1), "cuMemSetAccess");
    return (void *)(base + unit + at);
}

void guarded_free(void *address, size_t size, int device, void *stream)
{
    size_t mapped, unit, at = place(size, device, &mapped, &unit);
    Address first = (Address)address - at;
    void *popped;
    (void)stream;
    if (address == NULL)
        return;
    check(push(contexts[device]), "cuCtxPushCurrent");
    check(synchronize(), "a kernel before a tensor was freed");
    check(pop(&popped), "cuCtxPopCurrent");
    check(unmap(first, mapped), "cuMemUnmap");
    check(release_range(first - unit, mapped + 2 * unit), "cuMemAddressFree");
}
