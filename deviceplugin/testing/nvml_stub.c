/* A GPU driver's library for machines without GPUs: the calls of NVML that we use, answered from a
 * text file that a test may replace at any moment. Function names, structures' sizes and numbers
 * are NVML's published interface; behaviour is ours.
 *
 * FLYER_STUB_NVML names the file. One line a fact:
 *   driver 550.90.07
 *   gpu INDEX UUID PCI_ADDRESS MINOR PEER_INDEX|-1
 *   lost INDEX            every call on it says GPU_IS_LOST
 *   recovery INDEX ACTION field 230
 *   remap INDEX PENDING FAILED
 *   ecc INDEX COUNT       volatile uncorrected errors
 *   width INDEX LANES     PCIe lanes in use (16 unless said, of 16)
 *   idle INDEX CODE       its utilisation is refused with this error
 *   links INDEX COUNT     NVLink links that are up (12 unless said)
 *   event SEQUENCE INDEX TYPE DATA   an event (NVML's type), delivered once to every process that waits
 *   hang CALL             calls whose name contains CALL never return
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, LOST = 15, UNKNOWN = 999 };
enum { GPUS_MAX = 16, EVENTS_MAX = 256, LINKS = 12, FIELD_RECOVERY_ACTION = 230 };

struct gpu { char uuid[80]; char bus[32]; int minor, peer, lost, recovery, pending, failed, ecc, links, width, idle; };
struct event { long sequence; int gpu, type, data; };
struct state { char driver[80]; char hang[80]; int gpus, events; struct gpu gpu[GPUS_MAX]; struct event event[EVENTS_MAX]; };

typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned fieldId, scopeId; long long timestamp, latencyUsec; int valueType, nvmlReturn; union { unsigned uiVal; unsigned long long ullVal; double dVal; } value; } field_t;
typedef struct { void *device; unsigned long long eventType, eventData; unsigned gpuInstanceId, computeInstanceId; } event_t;

static long first_unseen = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int parse(struct state *s) {
    memset(s, 0, sizeof *s);
    const char *path = getenv("FLYER_STUB_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return 0;
    char line[512];
    while (fgets(line, sizeof line, file)) {
        int index = 0, a = 0, b = 0;
        long sequence = 0;
        char uuid[80], bus[32];
        if (sscanf(line, "driver %79s", s->driver) == 1 || sscanf(line, "hang %79s", s->hang) == 1) continue;
        if (sscanf(line, "gpu %d %79s %31s %d %d", &index, uuid, bus, &a, &b) == 5 && index >= 0 && index < GPUS_MAX) {
            struct gpu *g = &s->gpu[index];
            snprintf(g->uuid, sizeof g->uuid, "%s", uuid);
            snprintf(g->bus, sizeof g->bus, "%s", bus);
            g->minor = a; g->peer = b; g->links = b >= 0 ? LINKS : 0; g->width = 16;
            if (index >= s->gpus) s->gpus = index + 1;
            continue;
        }
        if (sscanf(line, "event %ld %d %d %d", &sequence, &index, &a, &b) == 4 && s->events < EVENTS_MAX) {
            s->event[s->events++] = (struct event){sequence, index, a, b};
            continue;
        }
        char word[32];
        b = 0;
        if (sscanf(line, "%31s %d %d %d", word, &index, &a, &b) < 2 || index < 0 || index >= GPUS_MAX) continue;
        struct gpu *g = &s->gpu[index];
        if (!strcmp(word, "lost")) g->lost = 1;
        else if (!strcmp(word, "recovery")) g->recovery = a;
        else if (!strcmp(word, "remap")) { g->pending = a; g->failed = b; }
        else if (!strcmp(word, "ecc")) g->ecc = a;
        else if (!strcmp(word, "links")) g->links = a;
        else if (!strcmp(word, "width")) g->width = a;
        else if (!strcmp(word, "idle")) g->idle = a;
    }
    fclose(file);
    return 1;
}

/* Every call reads the file, so that a fault holds from the moment it is written. */
static int enter(const char *call, struct state *s) {
    if (!parse(s)) return UNINITIALIZED;
    while (s->hang[0] && strstr(call, s->hang)) pause();
    return OK;
}

static int of(void *handle, struct state *s, const char *call, struct gpu **g) {
    long index = (long)handle - 1;
    int status = enter(call, s);
    if (status) return status;
    if (index < 0 || index >= s->gpus) return INVALID;
    *g = &s->gpu[index];
    return (*g)->lost ? LOST : OK;
}

#define ENTER struct state s; int status = enter(__func__, &s); if (status) return status
#define OF struct state s; struct gpu *g = NULL; int status = of(device, &s, __func__, &g); if (status) return status

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    ENTER;
    pthread_mutex_lock(&lock);
    if (first_unseen < 0) first_unseen = s.events ? s.event[s.events - 1].sequence + 1 : 1;
    pthread_mutex_unlock(&lock);
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int status) {
    switch (status) {
    case UNINITIALIZED: return "Uninitialized";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case TIMEOUT: return "Timeout";
    case LOST: return "GPU is lost";
    default: return "Error of the stand-in driver";
    }
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { ENTER; snprintf(text, size, "%s", s.driver); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { ENTER; *count = s.gpus; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    ENTER;
    if ((int)index >= s.gpus) return INVALID;
    *device = (void *)(long)(index + 1);
    return s.gpu[index].lost ? LOST : OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    ENTER;
    for (int i = 0; i < s.gpus; i++)
        if (!strcmp(uuid, s.gpu[i].uuid)) { *device = (void *)(long)(i + 1); return s.gpu[i].lost ? LOST : OK; }
    return NOT_FOUND;
}
/* Says the id of a lost GPU too: its events must be attributable. */
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    ENTER;
    long index = (long)device - 1;
    if (index < 0 || index >= s.gpus) return INVALID;
    snprintf(text, size, "%s", s.gpu[index].uuid);
    return OK;
}
static void fill(pci_t *pci, const char *bus) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->busId, sizeof pci->busId, "0000%.27s", bus);
}
int nvmlDeviceGetPciInfo_v3(void *device, pci_t *pci) { OF; fill(pci, g->bus); return OK; }
int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) { OF; *minor = g->minor; return OK; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) { OF; (void)g; snprintf(text, size, "NVIDIA A100-PCIE-40GB"); return OK; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) { OF; (void)g; *memory = (memory_t){42949672960ull, 42949672960ull, 0}; return OK; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { OF; (void)g; *major = 8; *minor = 0; return OK; }
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) { OF; if (g->idle) return g->idle; rates[0] = rates[1] = 0; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *lanes) { OF; *lanes = g->width; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *lanes) { OF; (void)g; *lanes = 16; return OK; }
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
    OF;
    if (g->peer < 0) return NOT_SUPPORTED;
    if (link >= LINKS) return INVALID;
    *active = (int)link < g->links;
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, pci_t *pci) {
    OF;
    if (g->peer < 0 || link >= LINKS) return INVALID;
    fill(pci, s.gpu[g->peer].bus);
    return OK;
}
int nvmlDeviceGetFieldValues(void *device, int count, field_t *fields) {
    OF;
    for (int i = 0; i < count; i++) {
        int known = fields[i].fieldId == FIELD_RECOVERY_ACTION && g->recovery >= 0;
        fields[i].nvmlReturn = known ? OK : NOT_SUPPORTED;
        fields[i].value.uiVal = known ? (unsigned)g->recovery : 0;
    }
    return OK;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    OF;
    *corrected = *uncorrected = 0; *pending = g->pending; *failed = g->failed;
    return OK;
}
int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *count) {
    OF;
    (void)type; (void)counter;
    *count = g->ecc;
    return OK;
}
int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) { OF; (void)g; *types = 0xC00F; return OK; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) { OF; (void)g; (void)types; (void)set; return OK; }
int nvmlEventSetCreate(void **set) { ENTER; *set = (void *)1; return OK; }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlEventSetWait_v2(void *set, event_t *data, unsigned timeout_ms) {
    (void)set;
    for (unsigned waited = 0;; waited += 20) {
        ENTER;
        for (int i = 0; i < s.events; i++) {
            pthread_mutex_lock(&lock);
            int fresh = s.event[i].sequence >= first_unseen;
            if (fresh) first_unseen = s.event[i].sequence + 1;
            pthread_mutex_unlock(&lock);
            if (fresh) {
                *data = (event_t){(void *)(long)(s.event[i].gpu + 1), (unsigned long long)s.event[i].type, (unsigned long long)s.event[i].data, 0xFFFFFFFF, 0xFFFFFFFF};
                return OK;
            }
        }
        if (waited >= timeout_ms) return TIMEOUT;
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
}
