/* HFReduce: collectives on the CPU, for C and languages that call C.
 *
 * Functions return a status; HFR_OK is 0. hfr_last_error() describes the last failure of the
 * calling thread: the operation, the reporting rank and the rank that caused it. Functions do not
 * throw and do not end the process.
 *
 * Every operation has a time-out in seconds. With a null `work` a call blocks until the operation
 * has ended; otherwise it returns at once with a handle for hfr_work_wait(). The memory of an
 * operation must stay valid and must not be changed until the operation has succeeded or failed.
 *
 * All ranks call the same operations in the same order. Functions may be called from any thread;
 * hfr_close() and hfr_work_free() only while no other call uses that handle. A forked child must
 * not use its parent's communicators.
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
typedef struct hfr_newcomer hfr_newcomer; /* a process that waits for admission to a group */

typedef int32_t hfr_status;
enum {
    HFR_OK = 0,
    HFR_INVALID = 1,       /* an argument or setting is invalid; the call had no effect */
    HFR_PEER_DIED = 2,     /* a process ended or its connection broke */
    HFR_PEER_STALLED = 3,  /* a process exists but has stopped sending heartbeats */
    HFR_PEER_LEFT = 4,     /* a peer closed while others still needed it */
    HFR_TIMED_OUT = 5,     /* the time-out of the operation passed */
    HFR_MISMATCH = 6,      /* ranks called different operations, or were started differently */
    HFR_PROTOCOL = 7,      /* a peer broke the protocol */
    HFR_ABORTED = 8,       /* a rank called hfr_abort() */
    HFR_IO = 9,            /* a system call failed */
    HFR_RENDEZVOUS = 10,   /* the ranks did not find each other */
    HFR_STILL_RUNNING = 11,/* the time-out of hfr_work_wait() passed; the operation continues */
    HFR_INTERNAL = 12,     /* an internal error of the library */
    HFR_DEVICE = 13        /* a rank's GPU or its driver failed */
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

/* How to join a group. Zero and NULL mean the default. Initialize with
 *     hfr_options options = HFR_OPTIONS_INIT;
 */
typedef struct hfr_options {
    size_t size;             /* sizeof(hfr_options): the version of the struct */
    uint32_t rank;           /* this rank, from 0 on */
    uint32_t world_size;     /* number of ranks */
    const char *rendezvous;  /* "HOST:PORT" at which rank 0 listens until all have come */
    const void *key;         /* the job's shared secret: 16 bytes or more … */
    size_t key_bytes;
    const char *key_file;    /* … or a file that holds it; one rank alone needs none */
    const char *job;         /* for messages; the same on all ranks */
    const char *node;        /* this machine; ranks with one name share memory (host name) */
    const char *zone;        /* its network zone ("default") */
    const char *address;     /* where other machines reach this one: "10.0.0.5", "10.0.0.0/8", "eth0",
                              * "ib*", "!docker0", or several with commas between them (all) */
    const char *topology;    /* file with machines, zones and bridges, in place of node and zone */
    size_t chunk_bytes;      /* of one reduce chunk: 4096 to 16777216, whole pages (262144) */
    double connect_seconds;  /* time-out of the rendezvous (120) */
    double liveness_seconds; /* silence after which a peer counts as stalled (10) */
    const char *determinism; /* "stable", "wide" or "stable,wide": which bits come out (default) */
} hfr_options;

#define HFR_OPTIONS_INIT \
    { sizeof(hfr_options), 0, 0, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0.0, 0.0, NULL }

/* The error of this thread's last call that failed. Set `size` before the call. Strings end with a
 * null byte and are truncated if they are too long. */
typedef struct hfr_error {
    size_t size;          /* sizeof(hfr_error) */
    hfr_status status;
    int32_t rank;         /* the reporting rank, -1: unknown */
    int32_t peer;         /* the rank that caused the error, -1: unknown */
    int32_t seen_by;      /* the rank that detected it first, -1: unknown */
    int64_t sequence;     /* the operation's number, -1: outside operations */
    char job[128];
    char node[64];        /* the node of the reporting rank */
    char peer_node[64];   /* the node of the rank that caused the error */
    char operation[128];
    char phase[128];      /* what this rank was doing */
    char message[1024];   /* the whole error in one sentence */
} hfr_error;

/* The library's version, as HFR_VERSION. */
uint32_t hfr_version(void);

/* The name of a status, for example "peer_died"; never NULL. */
const char *hfr_status_name(hfr_status status);

/* Fills `error` for this thread; its status is HFR_OK if nothing has failed yet. */
hfr_status hfr_last_error(hfr_error *error);

/* The same error in one sentence; valid until this thread's next call of the library. */
const char *hfr_last_message(void);

/* Joins the group; all ranks call it at about the same time. Raises the soft limit of open files
   where the group may need more. */
hfr_status hfr_init(const hfr_options *options, hfr_comm **comm);

/* hfr_init() with options from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, HFREDUCE_KEY_FILE and
 * the other environment variables. */
hfr_status hfr_init_from_environment(hfr_comm **comm);

/* Completes the outstanding operations, disconnects and frees `comm`, also if it returns an error.
 * `comm` may be NULL. */
hfr_status hfr_close(hfr_comm *comm, double timeout_seconds);

/* Aborts the group on every rank. Does not wait for other ranks; `comm` must still be closed. */
hfr_status hfr_abort(hfr_comm *comm, const char *reason);

/* Since 0.1.2. Makes a group of `number` ranks of `comm`, in this order; after a failure, of the
 * survivors. Each member calls it with the same list of ranks of `comm`, which may be broken and
 * must still be closed: its outstanding operations end now, and its memory remains its own:
 * hfr_free(comm, memory) frees it. May be called again after an error, with fewer members. */
hfr_status hfr_reconfigure(hfr_comm *comm, const uint32_t *members, size_t number,
                           double timeout_seconds, hfr_comm **next);

/* A member of the next group. Initialize with HFR_MEMBER_RANK(number) for a rank of the present
 * group, or with HFR_MEMBER_NEWCOMER(info, info_bytes). */
typedef struct hfr_member {
    size_t size;       /* sizeof(hfr_member): the version of the struct */
    uint32_t rank;     /* the rank in the present group, if info is NULL */
    const void *info;  /* what hfr_newcomer_info() returned to the newcomer … */
    size_t info_bytes; /* … sent to the members by any means */
} hfr_member;

#define HFR_MEMBER_RANK(number) { sizeof(hfr_member), (number), NULL, 0 }
#define HFR_MEMBER_NEWCOMER(info, info_bytes) { sizeof(hfr_member), 0, (info), (info_bytes) }

/* Since 0.1.3. hfr_reconfigure() with newcomers in the list; the first member is a rank of `comm`.
 * Infos are read only during the call. */
hfr_status hfr_reconfigure_with(hfr_comm *comm, const hfr_member *members, size_t number,
                                double timeout_seconds, hfr_comm **next);

/* Since 0.1.3. Opens a port at which the members of a group reach a newcomer. The options key,
 * chunk_bytes and determinism are those of the group; rank, world_size and topology are ignored,
 * rendezvous may be NULL, and hfr_newcomer_join() has a time-out in place of connect_seconds. */
hfr_status hfr_newcomer_init(const hfr_options *options, hfr_newcomer **newcomer);

/* Since 0.1.3. The newcomer's info for the members; valid until hfr_newcomer_free(). */
hfr_status hfr_newcomer_info(const hfr_newcomer *newcomer, const void **info, size_t *info_bytes);

/* Since 0.1.3. Waits until hfr_reconfigure_with() of the members names it, and connects; may be
 * called again after an error. The newcomer may be freed afterwards; `comm` must be closed. */
hfr_status hfr_newcomer_join(hfr_newcomer *newcomer, double timeout_seconds, hfr_comm **comm);

/* Since 0.1.3. Frees the newcomer, which may be NULL. Not while another call uses it. */
void hfr_newcomer_free(hfr_newcomer *newcomer);

hfr_status hfr_rank(const hfr_comm *comm, uint32_t *rank);
hfr_status hfr_world_size(const hfr_comm *comm, uint32_t *world_size);

/* Since 0.1.1. Allocates registered memory: zeroed, page-aligned, and read and written in place by
 * the ranks of this node in hfr_allreduce, hfr_reduce and hfr_reduce_scatter, without copies. A
 * forked child shares it. hfr_free() frees it while no operation uses it; hfr_close() frees all
 * that remains. */
hfr_status hfr_alloc(hfr_comm *comm, size_t bytes, void **memory);
hfr_status hfr_free(hfr_comm *comm, void *memory);

/* Reduces the buffers of all ranks, in place on all ranks. */
hfr_status hfr_allreduce(hfr_comm *comm, void *buffer, size_t count, hfr_dtype dtype, hfr_op op,
                         double timeout_seconds, hfr_work **work);

/* Since 0.1.2. hfr_allreduce() of `number` arrays as one operation, with counts[i] elements in
 * buffers[i]. The counts are equal on all ranks, and arrays do not overlap. The lists are read only
 * during the call. */
hfr_status hfr_allreduce_many(hfr_comm *comm, void *const *buffers, const size_t *counts,
                              size_t number, hfr_dtype dtype, hfr_op op, double timeout_seconds,
                              hfr_work **work);

/* Copies the root's buffer to the buffers of all ranks. */
hfr_status hfr_broadcast(hfr_comm *comm, void *buffer, size_t count, hfr_dtype dtype,
                         uint32_t root, double timeout_seconds, hfr_work **work);

/* Reduces the buffers of all ranks into the root's buffer; the other buffers are only read. */
hfr_status hfr_reduce(hfr_comm *comm, void *buffer, size_t count, hfr_dtype dtype, hfr_op op,
                      uint32_t root, double timeout_seconds, hfr_work **work);

/* Gathers `count` elements of each rank into the output of all ranks (world_size x count). */
hfr_status hfr_allgather(hfr_comm *comm, const void *input, void *output, size_t count,
                         hfr_dtype dtype, double timeout_seconds, hfr_work **work);

/* Reduces the inputs of all ranks (world_size x count): block r into rank r's output (count). */
hfr_status hfr_reduce_scatter(hfr_comm *comm, const void *input, void *output, size_t count,
                              hfr_dtype dtype, hfr_op op, double timeout_seconds,
                              hfr_work **work);

/* Gathers `count` elements of each rank into the root's output (world_size x count); the output of
 * the other ranks may be NULL. */
hfr_status hfr_gather(hfr_comm *comm, const void *input, void *output, size_t count,
                      hfr_dtype dtype, uint32_t root, double timeout_seconds, hfr_work **work);

/* Copies block r of the root's input (world_size x count) to rank r's output; the input of the
 * other ranks may be NULL. */
hfr_status hfr_scatter(hfr_comm *comm, const void *input, void *output, size_t count,
                       hfr_dtype dtype, uint32_t root, double timeout_seconds, hfr_work **work);

/* Sends block r of the input to rank r and receives block r of the output from it; input and output
 * have world_size x count elements. */
hfr_status hfr_alltoall(hfr_comm *comm, const void *input, void *output, size_t count,
                        hfr_dtype dtype, double timeout_seconds, hfr_work **work);

/* hfr_alltoall() with input_counts[r] elements to rank r and output_counts[r] elements from it;
 * blocks are contiguous, and both lists have world_size entries. */
hfr_status hfr_alltoallv(hfr_comm *comm, const void *input, const size_t *input_counts,
                         void *output, const size_t *output_counts, hfr_dtype dtype,
                         double timeout_seconds, hfr_work **work);

/* Point-to-point: both sides use the same count, type and tag (below 2^63). */
hfr_status hfr_send(hfr_comm *comm, const void *buffer, size_t count, hfr_dtype dtype,
                    uint32_t peer, uint64_t tag, double timeout_seconds, hfr_work **work);
hfr_status hfr_recv(hfr_comm *comm, void *buffer, size_t count, hfr_dtype dtype, uint32_t peer,
                    uint64_t tag, double timeout_seconds, hfr_work **work);

/* Ends when all ranks have called it. */
hfr_status hfr_barrier(hfr_comm *comm, double timeout_seconds, hfr_work **work);

/* Waits for the operation, at most `timeout_seconds`: returns its result or HFR_STILL_RUNNING. */
hfr_status hfr_work_wait(hfr_work *work, double timeout_seconds);

/* *done = 1 once the operation has ended. */
hfr_status hfr_work_done(const hfr_work *work, int32_t *done);

/* Frees the handle. An outstanding operation continues, and its memory must stay valid. */
void hfr_work_free(hfr_work *work);

#ifdef __cplusplus
}
#endif

#endif
