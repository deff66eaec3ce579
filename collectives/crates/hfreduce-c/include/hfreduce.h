/* HFReduce: collectives on the CPU, for C and whatever calls C.
 *
 * Functions return a status; HFR_OK is 0. What failed, where and because of whom is told by
 * hfr_last_error() for the calling thread. No function throws, and none ends the process.
 *
 * Every operation has a time-out in seconds and ends by it. With a null `work` a call returns when
 * the operation has ended; otherwise it returns at once with a handle for hfr_work_wait(). The
 * memory given to an operation stays alive and untouched until it has ended, in success or failure.
 *
 * All ranks call the same operations in the same order. Functions may be called from any thread;
 * hfr_close() and hfr_work_free() while no other call uses that handle. A communicator is not for
 * forked children.
 */
#ifndef HFREDUCE_H
#define HFREDUCE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HFR_VERSION_MAJOR 0
#define HFR_VERSION_MINOR 1
#define HFR_VERSION_PATCH 3
/* What hfr_version() of this header's library returns. */
#define HFR_VERSION ((HFR_VERSION_MAJOR << 16) | (HFR_VERSION_MINOR << 8) | HFR_VERSION_PATCH)

typedef struct hfr_comm hfr_comm; /* a connected group of ranks */
typedef struct hfr_work hfr_work; /* an operation under way */
typedef struct hfr_newcomer hfr_newcomer; /* one who waits to be taken into a group */

typedef int32_t hfr_status;
enum {
    HFR_OK = 0,
    HFR_INVALID = 1,       /* an argument or setting cannot be used; nothing has happened */
    HFR_PEER_DIED = 2,     /* a process ended or its connection broke */
    HFR_PEER_STALLED = 3,  /* a process is there and gave no sign of life */
    HFR_PEER_LEFT = 4,     /* a peer closed while others still needed it */
    HFR_TIMED_OUT = 5,     /* the operation's own time passed */
    HFR_MISMATCH = 6,      /* ranks called different operations, or were started differently */
    HFR_PROTOCOL = 7,      /* a peer broke the protocol */
    HFR_ABORTED = 8,       /* somebody called hfr_abort() */
    HFR_IO = 9,            /* the system refused something */
    HFR_RENDEZVOUS = 10,   /* the ranks did not find each other */
    HFR_STILL_RUNNING = 11,/* the time given to hfr_work_wait() passed; the operation goes on */
    HFR_INTERNAL = 12,     /* a fault of the library */
    HFR_DEVICE = 13        /* a rank's GPU or the driver of it failed */
};

typedef int32_t hfr_dtype;
enum {
    HFR_FLOAT32 = 0,
    HFR_BFLOAT16 = 1,
    HFR_FLOAT16 = 2,
    HFR_FLOAT64 = 3,
    HFR_INT32 = 4,
    HFR_INT64 = 5,
    HFR_UINT8 = 6,
    HFR_INT8 = 7,
    HFR_FLOAT8_E4M3FN = 8,
    HFR_FLOAT8_E5M2 = 9,
    HFR_INT16 = 10,
    HFR_UINT16 = 11,
    HFR_UINT32 = 12,
    HFR_UINT64 = 13
};

typedef int32_t hfr_op;
enum {
    HFR_SUM = 0,
    HFR_PRODUCT = 1,
    HFR_MIN = 2,
    HFR_MAX = 3,
    HFR_BAND = 4, /* the bitwise ones: integers only */
    HFR_BOR = 5,
    HFR_BXOR = 6,
    HFR_AVG = 7 /* floating-point types only */
};

/* How to join a group. Zero and NULL mean the default. Begin with
 *     hfr_options options = HFR_OPTIONS_INIT;
 */
typedef struct hfr_options {
    size_t size;             /* sizeof(hfr_options): which version of this struct it is */
    uint32_t rank;           /* this rank, from 0 on */
    uint32_t world_size;     /* how many there are */
    const char *rendezvous;  /* "HOST:PORT" at which rank 0 listens until all have come */
    const void *key;         /* what proves who belongs to the job: 16 bytes or more … */
    size_t key_bytes;
    const char *key_file;    /* … or a file that holds it; one rank alone needs none */
    const char *job;         /* for messages; the same on all ranks */
    const char *node;        /* this machine; ranks with one name share memory (host name) */
    const char *zone;        /* its network zone ("default") */
    const char *address;     /* where other machines reach this one: "10.0.0.5", "10.0.0.0/8", "eth0",
                              * "ib*", "!docker0", or several with commas between them (all) */
    const char *topology;    /* file with machines, zones and bridges, in place of node and zone */
    size_t chunk_bytes;      /* of one reduce chunk: 4096 to 16777216, whole pages (262144) */
    double connect_seconds;  /* how long ranks wait for each other (120) */
    double liveness_seconds; /* silence after which a peer counts as stalled (10) */
    const char *determinism; /* "stable", "wide" or "stable,wide": which bits come out (default) */
} hfr_options;

#define HFR_OPTIONS_INIT \
    { sizeof(hfr_options), 0, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0.0, 0.0, NULL }

/* What the last call of this thread that failed has to say. Set `size` before the call. Texts end
 * with a null byte and are cut where they are too long. */
typedef struct hfr_error {
    size_t size;          /* sizeof(hfr_error) */
    hfr_status status;
    int32_t rank;         /* which rank reports, -1: unknown */
    int32_t peer;         /* which rank is to blame, -1: unknown */
    int32_t seen_by;      /* which rank saw it first, -1: unknown */
    int64_t sequence;     /* the operation's number, -1: outside operations */
    char job[128];
    char node[64];        /* where the reporting rank runs */
    char peer_node[64];   /* where the one to blame runs */
    char operation[128];
    char phase[128];      /* what this rank was doing */
    char message[1024];   /* all of it in one sentence */
} hfr_error;

/* The library's version, as HFR_VERSION. */
uint32_t hfr_version(void);

/* A status in a word, as "peer_died"; never NULL. */
const char *hfr_status_name(hfr_status status);

/* Fills `error` for this thread; its status is HFR_OK if nothing has failed yet. */
hfr_status hfr_last_error(hfr_error *error);

/* The same in one sentence; valid until this thread's next call of the library. */
const char *hfr_last_message(void);

/* Joins the group; all ranks call it at about the same time. Raises the soft limit of open files
   where the group may need more. */
hfr_status hfr_init(const hfr_options *options, hfr_comm **comm);

/* The same from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, HFREDUCE_KEY_FILE and their like. */
hfr_status hfr_init_from_environment(hfr_comm **comm);

/* Finishes what is under way, takes leave and frees `comm`, whatever is returned. NULL is fine. */
hfr_status hfr_close(hfr_comm *comm, double timeout_seconds);

/* Breaks the group on every rank. Waits for nobody; `comm` still has to be closed. */
hfr_status hfr_abort(hfr_comm *comm, const char *reason);

/* Since 0.1.2. Goes on as a group of `number` of its ranks, in this order: after a failure with the
 * survivors. Each of them calls it with the same list of ranks of `comm`, which may be broken and
 * still has to be closed: what is under way there ends now, and hfr_free() takes its memory with it
 * alone. May be called again, with fewer members, after an error. */
hfr_status hfr_reconfigure(hfr_comm *comm, const uint32_t *members, size_t number,
                           double timeout_seconds, hfr_comm **next);

/* A member of the next group. Begin with HFR_MEMBER_RANK(number) for a rank of the present one, or
 * with HFR_MEMBER_NEWCOMER(info, info_bytes). */
typedef struct hfr_member {
    size_t size;       /* sizeof(hfr_member): which version of this struct it is */
    uint32_t rank;     /* which rank of the present group, where info is NULL */
    const void *info;  /* what hfr_newcomer_info() gave the newcomer … */
    size_t info_bytes; /* … which any means may bring here */
} hfr_member;

#define HFR_MEMBER_RANK(number) { sizeof(hfr_member), (number), NULL, 0 }
#define HFR_MEMBER_NEWCOMER(info, info_bytes) { sizeof(hfr_member), 0, (info), (info_bytes) }

/* Since 0.1.3. The same with newcomers in the list, which has a rank of `comm` first. Their infos are
 * read during the call alone. */
hfr_status hfr_reconfigure_with(hfr_comm *comm, const hfr_member *members, size_t number,
                                double timeout_seconds, hfr_comm **next);

/* Since 0.1.3. Opens a port at which the members of a group find a newcomer. Of the options the key
 * is the group's, as are chunk_bytes and determinism; rank, world_size and topology are not looked
 * at, rendezvous may be NULL, and connect_seconds is hfr_newcomer_join()'s to say. */
hfr_status hfr_newcomer_init(const hfr_options *options, hfr_newcomer **newcomer);

/* Since 0.1.3. What the members need to know of it; valid until hfr_newcomer_free(). */
hfr_status hfr_newcomer_info(const hfr_newcomer *newcomer, const void **info, size_t *info_bytes);

/* Since 0.1.3. Waits until hfr_reconfigure_with() of the members names it, and connects; may be
 * called again after an error. The newcomer may be freed afterwards, `comm` has to be closed. */
hfr_status hfr_newcomer_join(hfr_newcomer *newcomer, double timeout_seconds, hfr_comm **comm);

/* Since 0.1.3. Frees it; NULL is fine. Not while another call uses it. */
void hfr_newcomer_free(hfr_newcomer *newcomer);

hfr_status hfr_rank(const hfr_comm *comm, uint32_t *rank);
hfr_status hfr_world_size(const hfr_comm *comm, uint32_t *world_size);

/* Since 0.1.1. Zeroed memory, from the beginning of a page, which the ranks of this node read and
 * write in place when it is given to hfr_allreduce, hfr_reduce or hfr_reduce_scatter: nothing is
 * copied on its way in or out. A forked child shares it. hfr_free() gives it back while no operation
 * uses it, hfr_close() whatever is left. */
hfr_status hfr_alloc(hfr_comm *comm, size_t bytes, void **memory);
hfr_status hfr_free(hfr_comm *comm, void *memory);

/* Everybody's combination to everybody, in place. */
hfr_status hfr_allreduce(hfr_comm *comm, void *buffer, size_t count, hfr_dtype dtype, hfr_op op,
                         double timeout_seconds, hfr_work **work);

/* Since 0.1.2. The same for `number` arrays as one operation, counts[i] elements in buffers[i]; all
 * ranks fuse arrays of the same counts. They do not overlap. The lists are read during the call
 * alone. */
hfr_status hfr_allreduce_many(hfr_comm *comm, void *const *buffers, const size_t *counts,
                              size_t number, hfr_dtype dtype, hfr_op op, double timeout_seconds,
                              hfr_work **work);

/* The root's buffer to everybody, in place. */
hfr_status hfr_broadcast(hfr_comm *comm, void *buffer, size_t count, hfr_dtype dtype,
                         uint32_t root, double timeout_seconds, hfr_work **work);

/* Everybody's combination into the root's buffer; the others' is only read. */
hfr_status hfr_reduce(hfr_comm *comm, void *buffer, size_t count, hfr_dtype dtype, hfr_op op,
                      uint32_t root, double timeout_seconds, hfr_work **work);

/* Everybody's `count` elements into everybody's output of world_size x count. */
hfr_status hfr_allgather(hfr_comm *comm, const void *input, void *output, size_t count,
                         hfr_dtype dtype, double timeout_seconds, hfr_work **work);

/* Block r of everybody's combined input (world_size x count) into rank r's output (count). */
hfr_status hfr_reduce_scatter(hfr_comm *comm, const void *input, void *output, size_t count,
                              hfr_dtype dtype, hfr_op op, double timeout_seconds,
                              hfr_work **work);

/* Everybody's `count` elements into the root's output (world_size x count); NULL elsewhere. */
hfr_status hfr_gather(hfr_comm *comm, const void *input, void *output, size_t count,
                      hfr_dtype dtype, uint32_t root, double timeout_seconds, hfr_work **work);

/* Block r of the root's input (world_size x count; NULL elsewhere) into rank r's output. */
hfr_status hfr_scatter(hfr_comm *comm, const void *input, void *output, size_t count,
                       hfr_dtype dtype, uint32_t root, double timeout_seconds, hfr_work **work);

/* Block r of the input to rank r, block r of the output from it; world_size x count each. */
hfr_status hfr_alltoall(hfr_comm *comm, const void *input, void *output, size_t count,
                        hfr_dtype dtype, double timeout_seconds, hfr_work **work);

/* The same with input_counts[r] elements to rank r and output_counts[r] from it, one after the
 * other in memory; both lists have world_size entries. */
hfr_status hfr_alltoallv(hfr_comm *comm, const void *input, const size_t *input_counts,
                         void *output, const size_t *output_counts, hfr_dtype dtype,
                         double timeout_seconds, hfr_work **work);

/* To one other rank, which receives as many elements of that type with the same tag (below 2^63). */
hfr_status hfr_send(hfr_comm *comm, const void *buffer, size_t count, hfr_dtype dtype,
                    uint32_t peer, uint64_t tag, double timeout_seconds, hfr_work **work);
hfr_status hfr_recv(hfr_comm *comm, void *buffer, size_t count, hfr_dtype dtype, uint32_t peer,
                    uint64_t tag, double timeout_seconds, hfr_work **work);

/* Ends when everybody has called it. */
hfr_status hfr_barrier(hfr_comm *comm, double timeout_seconds, hfr_work **work);

/* Until the operation has ended, at most so long: its result, or HFR_STILL_RUNNING. */
hfr_status hfr_work_wait(hfr_work *work, double timeout_seconds);

/* *done = 1 once the operation has ended. */
hfr_status hfr_work_done(const hfr_work *work, int32_t *done);

/* Frees the handle. An operation that is under way goes on, and so must its memory. */
void hfr_work_free(hfr_work *work);

#ifdef __cplusplus
}
#endif

#endif
