/* Every operation with its result, and everything that can be refused. Ends with 0 if all is right. */
#include <hfreduce.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WAIT 60.0
#define MOST 64

#define EXPECT(condition)                                                                  \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, hfr_last_message()); \
            exit(EXIT_FAILURE);                                                            \
        }                                                                                  \
    } while (0)

#define OK(call) EXPECT((call) == HFR_OK)

static void refusals(hfr_comm *comm)
{
    int32_t value = 0;
    hfr_work *work = NULL;
    hfr_error error = { .size = sizeof error };
    hfr_options options = HFR_OPTIONS_INIT;
    hfr_comm *other = NULL;

    EXPECT(hfr_allreduce(NULL, &value, 1, HFR_INT32, HFR_SUM, WAIT, NULL) == HFR_INVALID);
    EXPECT(hfr_allreduce(comm, NULL, 1, HFR_INT32, HFR_SUM, WAIT, NULL) == HFR_INVALID);
    EXPECT(hfr_allreduce(comm, &value, 1, 99, HFR_SUM, WAIT, NULL) == HFR_INVALID);
    EXPECT(hfr_allreduce(comm, &value, 1, HFR_INT32, -1, WAIT, NULL) == HFR_INVALID);
    EXPECT(hfr_allreduce(comm, &value, 1, HFR_INT32, HFR_AVG, WAIT, NULL) == HFR_INVALID);
    EXPECT(hfr_allreduce(comm, &value, 1, HFR_INT32, HFR_SUM, NAN, NULL) == HFR_INVALID);
    EXPECT(hfr_allreduce(comm, &value, SIZE_MAX, HFR_INT32, HFR_SUM, WAIT, NULL) == HFR_INVALID);
    EXPECT(hfr_broadcast(comm, &value, 1, HFR_INT32, 999, WAIT, &work) == HFR_INVALID);
    EXPECT(work == NULL);
    EXPECT(hfr_work_wait(NULL, WAIT) == HFR_INVALID);
    EXPECT(hfr_rank(comm, NULL) == HFR_INVALID);
    EXPECT(hfr_reconfigure(comm, NULL, 1, WAIT, &other) == HFR_INVALID);
    EXPECT(hfr_init(NULL, &other) == HFR_INVALID);
    EXPECT(hfr_init(&options, NULL) == HFR_INVALID);
    options.size = 8;
    EXPECT(hfr_init(&options, &other) == HFR_INVALID);
    OK(hfr_last_error(&error));
    EXPECT(error.status == HFR_INVALID && strstr(error.message, "HFR_OPTIONS_INIT"));
    options.size = sizeof options;
    options.rank = 1;
    options.world_size = 2;
    options.key = "short";
    options.key_bytes = 5;
    EXPECT(hfr_init(&options, &other) == HFR_INVALID && strstr(hfr_last_message(), "key_bytes"));
    options.key = "a key of sixteen bytes or more";
    options.key_bytes = strlen(options.key);
    options.rendezvous = "nowhere";
    options.determinism = "fast";
    EXPECT(hfr_init(&options, &other) == HFR_INVALID && strstr(hfr_last_message(), "wide"));
    options.size = offsetof(hfr_options, determinism); /* a program of the first version */
    EXPECT(hfr_init(&options, &other) == HFR_INVALID && strstr(hfr_last_message(), "nowhere"));
    EXPECT(other == NULL);
    OK(hfr_close(NULL, 0.0));
    hfr_work_free(NULL);
}

int main(int argc, char **argv)
{
    hfr_comm *comm = NULL;
    hfr_work *work = NULL;
    hfr_options options = HFR_OPTIONS_INIT;
    uint32_t rank, ranks;
    int64_t in[MOST], out[MOST * MOST];
    size_t gives[MOST], takes[MOST];
    int32_t done = 0;

    EXPECT(argc == 4);
    options.rank = (uint32_t)atoi(argv[1]);
    options.world_size = (uint32_t)atoi(argv[2]);
    options.rendezvous = argv[3];
    options.key = "a key of sixteen bytes or more";
    options.key_bytes = strlen(options.key);
    options.job = "test/c";
    options.determinism = "stable,wide";
    options.node = options.rank % 2 ? "odd" : "even"; /* two machines: shared memory and TCP */
    OK(hfr_init(&options, &comm));
    OK(hfr_rank(comm, &rank));
    OK(hfr_world_size(comm, &ranks));
    EXPECT(rank == options.rank && ranks == options.world_size && ranks <= MOST);
    refusals(comm);

    in[0] = rank + 1;
    OK(hfr_allreduce(comm, in, 1, HFR_INT64, HFR_SUM, WAIT, NULL));
    EXPECT(in[0] == ranks * (ranks + 1) / 2);
    {
        int64_t first[2] = { rank, 1 }, second = 2 * rank;
        void *arrays[3] = { first, NULL, &second };
        size_t counts[3] = { 2, 0, 1 };

        OK(hfr_allreduce_many(comm, arrays, counts, 3, HFR_INT64, HFR_SUM, WAIT, NULL));
        EXPECT(first[0] == ranks * (ranks - 1) / 2 && first[1] == ranks);
        EXPECT(second == ranks * (ranks - 1));
        OK(hfr_allreduce_many(comm, NULL, NULL, 0, HFR_INT64, HFR_SUM, WAIT, NULL));
        counts[1] = 1;
        EXPECT(hfr_allreduce_many(comm, arrays, counts, 3, HFR_INT64, HFR_SUM, WAIT, NULL)
                   == HFR_INVALID
               && strstr(hfr_last_message(), "buffers[1] is NULL"));
        arrays[1] = arrays[0];
        counts[0] = counts[1] = counts[2] = SIZE_MAX / 2 / sizeof(int64_t);
        EXPECT(hfr_allreduce_many(comm, arrays, counts, 3, HFR_INT64, HFR_SUM, WAIT, NULL)
                   == HFR_INVALID
               && strstr(hfr_last_message(), "3 arrays are too many"));
        EXPECT(hfr_allreduce_many(comm, NULL, counts, 1, HFR_INT64, HFR_SUM, WAIT, NULL)
               == HFR_INVALID);
    }
    in[0] = rank;
    OK(hfr_reduce(comm, in, 1, HFR_INT64, HFR_MAX, 1, WAIT, NULL));
    EXPECT(rank != 1 || in[0] == ranks - 1);
    in[0] = rank;
    OK(hfr_broadcast(comm, in, 1, HFR_INT64, 1, WAIT, NULL));
    EXPECT(in[0] == 1);
    in[0] = rank * 10;
    OK(hfr_allgather(comm, in, out, 1, HFR_INT64, WAIT, NULL));
    for (uint32_t r = 0; r < ranks; r++)
        EXPECT(out[r] == r * 10);
    for (uint32_t r = 0; r < ranks; r++)
        in[r] = rank + r;
    OK(hfr_reduce_scatter(comm, in, out, 1, HFR_INT64, HFR_SUM, WAIT, NULL));
    EXPECT(out[0] == ranks * (ranks - 1) / 2 + ranks * rank);
    OK(hfr_alltoall(comm, in, out, 1, HFR_INT64, WAIT, NULL));
    for (uint32_t r = 0; r < ranks; r++)
        EXPECT(out[r] == r + rank);
    for (uint32_t r = 0; r < ranks; r++) {
        gives[r] = rank == 0 ? 1 : 0;
        takes[r] = r == 0 ? 1 : 0;
    }
    OK(hfr_alltoallv(comm, in, gives, out, takes, HFR_INT64, WAIT, NULL));
    EXPECT(out[0] == rank);
    OK(hfr_gather(comm, in, rank == 0 ? out : NULL, 1, HFR_INT64, 0, WAIT, NULL));
    OK(hfr_scatter(comm, rank == 0 ? out : NULL, in, 1, HFR_INT64, 0, WAIT, NULL));
    EXPECT(in[0] == rank);
    in[0] = rank;
    OK(hfr_recv(comm, out, 1, HFR_INT64, (rank + ranks - 1) % ranks, 7, WAIT, &work));
    OK(hfr_send(comm, in, 1, HFR_INT64, (rank + 1) % ranks, 7, WAIT, NULL));
    OK(hfr_work_wait(work, WAIT));
    OK(hfr_work_done(work, &done));
    EXPECT(done == 1 && out[0] == (rank + ranks - 1) % ranks);
    hfr_work_free(work);

    /* Rank 0 sends only when the others have found that their wait can end before the operation. */
    if (rank != 0) {
        OK(hfr_recv(comm, out, 1, HFR_INT64, 0, 8, WAIT, &work));
        EXPECT(hfr_work_wait(work, 0.0) == HFR_STILL_RUNNING);
        OK(hfr_send(comm, in, 1, HFR_INT64, 0, 9, WAIT, NULL));
        OK(hfr_work_wait(work, WAIT));
        hfr_work_free(work);
    }
    for (uint32_t r = 1; rank == 0 && r < ranks; r++) {
        OK(hfr_recv(comm, out, 1, HFR_INT64, r, 9, WAIT, NULL));
        OK(hfr_send(comm, in, 1, HFR_INT64, r, 8, WAIT, NULL));
    }
    {
        void *memory = NULL;
        int32_t *counts = NULL;
        OK(hfr_alloc(comm, 4096 * sizeof *counts, &memory));
        counts = memory;
        EXPECT(counts[4095] == 0);
        counts[4095] = 1;
        OK(hfr_allreduce(comm, counts, 4096, HFR_INT32, HFR_SUM, WAIT, NULL));
        EXPECT(counts[0] == 0 && counts[4095] == (int32_t)ranks);
        OK(hfr_free(comm, counts));
        EXPECT(hfr_free(comm, counts) == HFR_INVALID);
        OK(hfr_free(comm, NULL));
        EXPECT(hfr_alloc(comm, SIZE_MAX, &memory) == HFR_INVALID);
        EXPECT(hfr_alloc(comm, 1, NULL) == HFR_INVALID);
        OK(hfr_alloc(comm, 1, &memory)); /* left to hfr_close() */
    }
    OK(hfr_barrier(comm, WAIT, NULL));

    /* One breaks the group, once all others have passed the barrier: they hear who and why. */
    if (rank == 0) {
        for (uint32_t r = 1; r < ranks; r++)
            OK(hfr_recv(comm, out, 1, HFR_INT64, r, 10, WAIT, NULL));
        OK(hfr_abort(comm, "enough for today"));
    } else {
        hfr_error error = { .size = sizeof error };
        int64_t word = 1;
        OK(hfr_send(comm, &word, 1, HFR_INT64, 0, 10, WAIT, &work));
        EXPECT(hfr_allreduce(comm, in, 1, HFR_INT64, HFR_SUM, WAIT, NULL) == HFR_ABORTED);
        hfr_work_wait(work, WAIT); /* it may have gone well or not */
        hfr_work_free(work);
        EXPECT(hfr_barrier(comm, WAIT, NULL) == HFR_ABORTED);
        OK(hfr_last_error(&error));
        EXPECT(error.status == HFR_ABORTED && error.rank == (int32_t)rank);
        EXPECT(error.peer == 0 || error.seen_by == 0);
        EXPECT(!strcmp(error.job, "test/c") && strstr(error.message, "enough for today"));
        EXPECT(error.operation[0] && error.phase[0] && error.node[0]);
    }
    EXPECT(hfr_close(comm, WAIT) != HFR_OK || rank == 0);
    return EXIT_SUCCESS;
}
