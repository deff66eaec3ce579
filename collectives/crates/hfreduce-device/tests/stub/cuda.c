/* A CUDA driver and GDRCopy over host memory, for tests: streams are threads, "device memory" is
 * malloc's.
 *
 * Copies run late, on their stream's thread, and check both ends at that moment: a host range that is
 * not registered any more or device memory that was freed is a violation, counted and not touched.
 * Calls fail on demand, once or from then on; copies of one direction wait for permission. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_READY = 600 };
enum { DOWN, UP, RECORD, WAIT, GATE };
#define LENGTH(array) (sizeof(array) / sizeof *(array))

typedef struct { long recorded, passed; int live; } event_t;
typedef struct op {
    struct op *next;
    int kind;
    char *to;
    const char *from;
    size_t bytes;
    event_t *event;
    long number;
} op_t;
typedef struct { op_t *first, **last; int dying; } stream_t;
typedef struct { char *base; size_t bytes; uint64_t number, block; } range_t;
typedef struct { int kind; uint64_t device; size_t bytes; } entry_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static range_t registered[4096], device[4096], windows[4096];
static uint64_t allocations;
static entry_t journal[65536];
static long journal_length, violations, launches, stalls, streams, events, contexts, depth;
static long allowed[2] = {-1, -1}, gate_open = 1, delay_us;
static char failing[64], stalling[64];
static long fail_after;
static int fail_code, fail_sticky, dead;

/* Memory that stays as long as the library: what touches it late is counted, not crashed on. It goes
 * with the library, so that a search for leaks finds those of others. */
typedef struct kept { struct kept *next; _Alignas(16) char memory[]; } kept_t;
static kept_t *all_kept;

/* With the mutex. */
static void *keep(size_t bytes) {
    kept_t *made = calloc(1, sizeof *made + bytes);
    made->next = all_kept;
    all_kept = made;
    return made->memory;
}
__attribute__((destructor)) static void let_go(void) {
    for (kept_t *next; streams == 0 && all_kept; all_kept = next) {
        next = all_kept->next;
        free(all_kept);
    }
}

static void note(int kind, uint64_t at, size_t bytes) {
    if (journal_length < (long)LENGTH(journal)) {
        journal[journal_length++] = (entry_t){kind, at, bytes};
    }
}

/* With the mutex: the code with which this call fails, or 0. */
static int enter(const char *name) {
    if (strcmp(name, stalling) == 0) {
        stalls++;
        for (stalling[0] = 0, gate_open = 0; !gate_open;) {
            pthread_cond_wait(&changed, &mutex);
        }
    }
    if (dead) {
        return dead;
    }
    if (strcmp(name, failing) != 0 || --fail_after > 0) {
        return OK;
    }
    failing[0] = 0;
    if (fail_sticky) {
        dead = fail_code;
    }
    return fail_code;
}

#define CALL(name, body)                    \
    {                                       \
        pthread_mutex_lock(&mutex);         \
        int code = enter(name);             \
        if (code == OK) {                   \
            body;                           \
        }                                   \
        pthread_cond_broadcast(&changed);   \
        pthread_mutex_unlock(&mutex);       \
        return code;                        \
    }

static const range_t *find(const range_t *ranges, size_t count, const char *at, size_t bytes) {
    for (size_t i = 0; i < count; i++) {
        const range_t *range = &ranges[i];
        if (range->base && at >= range->base && at + bytes <= range->base + range->bytes) {
            return range;
        }
    }
    return NULL;
}

static int holds(const range_t *ranges, size_t count, const char *at, size_t bytes) {
    return find(ranges, count, at, bytes) != NULL;
}

static int put(range_t *ranges, size_t count, char *base, size_t bytes) {
    for (size_t i = 0; i < count; i++) {
        if (!ranges[i].base) {
            allocations++;
            ranges[i] = (range_t){base, bytes, allocations, allocations};
            return OK;
        }
    }
    return INVALID_VALUE;
}

static int take(range_t *ranges, size_t count, const char *base) {
    for (size_t i = 0; i < count; i++) {
        if (ranges[i].base && ranges[i].base == base) {
            ranges[i].base = NULL;
            return OK;
        }
    }
    return INVALID_VALUE;
}

static int may_run(const op_t *op) {
    switch (op->kind) {
    case WAIT: return op->event->passed >= op->number;
    case GATE: return gate_open;
    case DOWN:
    case UP: return !dead && allowed[op->kind] != 0;
    default: return 1;
    }
}

static void perform(const op_t *op) {
    if (op->kind == RECORD) {
        op->event->passed = op->number;
    } else if (op->kind == DOWN || op->kind == UP) {
        const char *host = op->kind == DOWN ? op->to : op->from;
        const char *gpu = op->kind == DOWN ? op->from : op->to;
        if (allowed[op->kind] > 0) {
            allowed[op->kind]--;
        }
        if (holds(registered, LENGTH(registered), host, op->bytes) &&
            holds(device, LENGTH(device), gpu, op->bytes)) {
            memcpy(op->to, op->from, op->bytes);
        } else {
            violations++;
        }
        note(op->kind == DOWN ? 'd' : 'u', (uint64_t)(uintptr_t)gpu, op->bytes);
    }
}

static void *run(void *argument) {
    stream_t *stream = argument;
    pthread_mutex_lock(&mutex);
    for (;;) {
        while (!stream->first && !stream->dying) {
            pthread_cond_wait(&changed, &mutex);
        }
        op_t *op = stream->first;
        if (!op) {
            break;
        }
        if (delay_us && (op->kind == DOWN || op->kind == UP)) {
            pthread_mutex_unlock(&mutex);
            usleep((useconds_t)delay_us);
            pthread_mutex_lock(&mutex);
        }
        while (!may_run(op)) {
            pthread_cond_wait(&changed, &mutex);
        }
        perform(op);
        stream->first = op->next;
        if (!stream->first) {
            stream->last = &stream->first;
        }
        free(op);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&mutex);
    free(stream);
    return NULL;
}

static void queue(stream_t *stream, op_t op) {
    if ((uintptr_t)stream <= 2) { /* the driver's own streams are always empty here */
        perform(&op);
        return;
    }
    op_t *kept = malloc(sizeof *kept);
    *kept = op;
    kept->next = NULL;
    *stream->last = kept;
    stream->last = &kept->next;
}

int cuInit(unsigned flags) CALL("cuInit", (void)flags)
int cuDeviceGetCount(int *count) CALL("cuDeviceGetCount", *count = 2)
int cuDeviceGet(int *out, int ordinal)
    CALL("cuDeviceGet", if (ordinal < 0 || ordinal > 1) code = INVALID_DEVICE; else *out = ordinal)
int cuDeviceGetPCIBusId(char *name, int length, int ordinal)
    CALL("cuDeviceGetPCIBusId", snprintf(name, (size_t)length, "FFFF:0%d:00.0", ordinal))
int cuDevicePrimaryCtxRetain(void **context, int ordinal)
    CALL("cuDevicePrimaryCtxRetain", contexts++; *context = (void *)(uintptr_t)(ordinal + 1))
int cuDevicePrimaryCtxRelease_v2(int ordinal)
    CALL("cuDevicePrimaryCtxRelease_v2", (void)ordinal; contexts--)
int cuCtxPushCurrent_v2(void *context) CALL("cuCtxPushCurrent_v2", (void)context; depth++)
int cuCtxPopCurrent_v2(void **context) CALL("cuCtxPopCurrent_v2", *context = NULL; depth--)

int cuStreamCreate(stream_t **out, unsigned flags)
    CALL("cuStreamCreate", (void)flags; stream_t *made = calloc(1, sizeof *made);
         made->last = &made->first; pthread_t thread; pthread_create(&thread, NULL, run, made);
         pthread_detach(thread); streams++; *out = made)
int cuStreamDestroy_v2(stream_t *stream)
    CALL("cuStreamDestroy_v2", stream->dying = 1; streams--)
int cuStreamWaitEvent(stream_t *stream, event_t *event, unsigned flags)
    CALL("cuStreamWaitEvent", (void)flags;
         queue(stream, (op_t){.kind = WAIT, .event = event, .number = event->recorded}))
int cuEventCreate(event_t **out, unsigned flags)
    CALL("cuEventCreate", (void)flags; *out = keep(sizeof **out); (*out)->live = 1; events++)
/* An operation of a stream may still point to it. */
int cuEventDestroy_v2(event_t *event) CALL("cuEventDestroy_v2", event->live = 0; events--)
int cuEventRecord(event_t *event, stream_t *stream)
    CALL("cuEventRecord",
         queue(stream, (op_t){.kind = RECORD, .event = event, .number = ++event->recorded}))
int cuEventQuery(event_t *event)
    CALL("cuEventQuery", if (event->passed < event->recorded) code = NOT_READY)

int cuMemHostRegister_v2(void *base, size_t bytes, unsigned flags)
    CALL("cuMemHostRegister_v2", (void)flags;
         code = put(registered, LENGTH(registered), base, bytes))
int cuMemHostUnregister(void *base)
    CALL("cuMemHostUnregister", code = take(registered, LENGTH(registered), base))
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, stream_t *stream)
    CALL("cuMemcpyDtoHAsync_v2", note('D', from, bytes);
         queue(stream, (op_t){.kind = DOWN, .to = to, .from = (char *)(uintptr_t)from, .bytes = bytes}))
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, stream_t *stream)
    CALL("cuMemcpyHtoDAsync_v2", note('U', to, bytes);
         queue(stream, (op_t){.kind = UP, .to = (char *)(uintptr_t)to, .from = from, .bytes = bytes}))
int cuPointerGetAttribute(void *out, int attribute, uint64_t pointer)
    CALL("cuPointerGetAttribute",
         const range_t *range = find(device, LENGTH(device), (char *)(uintptr_t)pointer, 1);
         if (!range) code = INVALID_VALUE;
         else if (attribute == 7) *(uint64_t *)out = range->number;
         else if (attribute == 20) *(uint64_t *)out = range->block;
         else *(int *)out = attribute == 2 ? 2 : 0)

int cuGetErrorName(int code, const char **name) {
    *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *name ? OK : INVALID_VALUE;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 700 ? "an illegal memory access was encountered" : code == 2 ? "out of memory" : NULL;
    return *text ? OK : INVALID_VALUE;
}

/* GDRCopy over the same memory: a window starts at the address that it maps; copies must lie in a
 * mapped window and in allocated memory. */

static long sessions, pins;

typedef struct { unsigned long number; } pin_t;
typedef struct {
    uint64_t address, mapped_bytes;
    uint32_t page_bytes;
    uint64_t cycles;
    uint32_t cycles_per_ms;
    unsigned flags;
    int kind;
} info_t;

void *gdr_open(void) {
    pthread_mutex_lock(&mutex);
    int code = enter("gdr_open");
    sessions += code == OK;
    pthread_mutex_unlock(&mutex);
    return code == OK ? &sessions : NULL;
}
int gdr_close(void *session) CALL("gdr_close", (void)session; sessions--)
int gdr_pin_buffer(void *session, unsigned long address, size_t bytes, uint64_t token, uint32_t space,
                   pin_t *pin)
    CALL("gdr_pin_buffer", (void)session; (void)token; (void)space; pins++;
         violations += address % 65536 != 0 || bytes % 65536 != 0;
         code = put(windows, LENGTH(windows), (char *)address, bytes); pin->number = address)
int gdr_unpin_buffer(void *session, pin_t pin)
    CALL("gdr_unpin_buffer", (void)session;
         code = take(windows, LENGTH(windows), (char *)pin.number))
int gdr_get_info_v2(void *session, pin_t pin, info_t *info)
    CALL("gdr_get_info_v2", (void)session; *info = (info_t){.address = pin.number})
int gdr_map(void *session, pin_t pin, void **map, size_t bytes)
    CALL("gdr_map", (void)session; (void)bytes; *map = (void *)pin.number)
int gdr_unmap(void *session, pin_t pin, void *map, size_t bytes)
    CALL("gdr_unmap", (void)session; (void)pin; (void)map; (void)bytes)

static void by_processor(int kind, char *to, const char *from, size_t bytes) {
    const char *gpu = kind == 'w' ? to : from;
    if (holds(windows, LENGTH(windows), gpu, bytes) && holds(device, LENGTH(device), gpu, bytes)) {
        memcpy(to, from, bytes);
    } else {
        violations++;
    }
    note(kind, (uint64_t)(uintptr_t)gpu, bytes);
}

int gdr_copy_to_mapping(pin_t pin, void *to, const void *from, size_t bytes)
    CALL("gdr_copy_to_mapping", (void)pin; by_processor('w', to, from, bytes))
int gdr_copy_from_mapping(pin_t pin, void *to, const void *from, size_t bytes)
    CALL("gdr_copy_from_mapping", (void)pin; by_processor('r', to, from, bytes))

/* Whatever could start a kernel only counts that it was called. */
int cuLaunchKernel(void) { return launches++, OK; }
int cuLaunchKernelEx(void) { return launches++, OK; }
int cuLaunchCooperativeKernel(void) { return launches++, OK; }
int cuLaunchHostFunc(void) { return launches++, OK; }
int cuGraphLaunch(void) { return launches++, OK; }
int cuMemsetD8Async(void) { return launches++, OK; }

/* What tests call. */

#define LOCKED(...)                   \
    {                                 \
        pthread_mutex_lock(&mutex);   \
        __VA_ARGS__;                  \
        pthread_cond_broadcast(&changed); \
        pthread_mutex_unlock(&mutex); \
    }

/* The `after`th call of `name` from now on fails with `code`, and everything after it if `sticky`. */
void stub_fail(const char *name, long after, int code, int sticky)
    LOCKED(snprintf(failing, sizeof failing, "%s", name); fail_after = after; fail_code = code;
           fail_sticky = sticky; dead = 0)
/* `count` more copies of this direction (0 down, 1 up) run; -1: all. */
void stub_allow(int direction, long count) LOCKED(allowed[direction] = count)
void stub_delay(long microseconds) LOCKED(delay_us = microseconds)
/* What is queued in this stream from now on waits for `stub_open`. */
void stub_gate(stream_t *stream) LOCKED(gate_open = 0; queue(stream, (op_t){.kind = GATE}))
/* The next call of `name` does not come back before `stub_open`. */
void stub_stall(const char *name) LOCKED(snprintf(stalling, sizeof stalling, "%s", name))
void stub_open(void) LOCKED(gate_open = 1)

uint64_t stub_device_alloc(size_t bytes) {
    char *base;
    LOCKED(base = keep(bytes ? bytes : 1); put(device, LENGTH(device), base, bytes))
    return (uint64_t)(uintptr_t)base;
}
/* Windows to this range show nothing any more. */
static void darken(const range_t *range) {
    for (size_t i = 0; range && i < LENGTH(windows); i++) {
        if (windows[i].base && windows[i].base < range->base + range->bytes &&
            range->base < windows[i].base + windows[i].bytes) {
            windows[i].bytes = 0;
        }
    }
}

/* The memory itself stays: what touches it after this is counted, not crashed on. */
void stub_device_free(uint64_t base)
    LOCKED(darken(find(device, LENGTH(device), (char *)(uintptr_t)base, 1));
           take(device, LENGTH(device), (char *)(uintptr_t)base))
/* At the same address, over what looks like the same memory, another allocation; or the same
 * allocation over other memory. */
void stub_device_again(uint64_t base, int same)
    LOCKED(range_t *range = (range_t *)find(device, LENGTH(device), (char *)(uintptr_t)base, 1);
           darken(range); *(same ? &range->block : &range->number) = ++allocations)

long stub_count(const char *what) {
    long count = -1;
    LOCKED(
        if (!strcmp(what, "registrations")) {
            count = 0;
            for (size_t i = 0; i < LENGTH(registered); i++) {
                count += registered[i].base != NULL;
            }
        }
        if (!strcmp(what, "windows")) {
            count = sessions;
            for (size_t i = 0; i < LENGTH(windows); i++) {
                count += windows[i].base != NULL;
            }
        }
        if (!strcmp(what, "pins")) count = pins;
        if (!strcmp(what, "streams")) count = streams;
        if (!strcmp(what, "events")) count = events;
        if (!strcmp(what, "contexts")) count = contexts;
        if (!strcmp(what, "depth")) count = depth;
        if (!strcmp(what, "violations")) count = violations;
        if (!strcmp(what, "launches")) count = launches;
        if (!strcmp(what, "stalls")) count = stalls;
        if (!strcmp(what, "journal")) count = journal_length)
    return count;
}
/* Entry `at`: D, U queued; d, u done; r, w read and written by the processor. */
int stub_journal(long at, uint64_t *where, size_t *bytes) {
    int kind = 0;
    LOCKED(if (at < journal_length) {
        kind = journal[at].kind;
        *where = journal[at].device;
        *bytes = journal[at].bytes;
    })
    return kind;
}
