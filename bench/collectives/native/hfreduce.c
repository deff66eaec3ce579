/* Collectives in rounds: hfreduce SOCKET GROUP, joined as the environment says. No Python, no torch. */
#include "rank.h"

#include <hfreduce.h>

#define WAIT 60.0

struct buffer {
    void *memory;
    size_t held;
};

static void fail(void)
{
    fprintf(stderr, "%s\n", hfr_last_message());
    exit(EXIT_FAILURE);
}

static void *reserve(hfr_comm *comm, struct buffer *buffer, size_t bytes, int registered)
{
    if (bytes > buffer->held) {
        if (registered) {
            if (hfr_free(comm, buffer->memory) || hfr_alloc(comm, bytes, &buffer->memory))
                fail();
        } else {
            free(buffer->memory);
            buffer->memory = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
            if (!buffer->memory)
                die("memory");
        }
        buffer->held = bytes;
    }
    return buffer->memory;
}

static hfr_status round_trip(hfr_comm *comm, void *input, void *output, size_t count,
                             hfr_dtype type, uint32_t rank)
{
    hfr_status status;

    if (rank % 2 == 0) {
        status = hfr_send(comm, input, count, type, rank + 1, 0, WAIT, NULL);
        return status ? status : hfr_recv(comm, output, count, type, rank + 1, 0, WAIT, NULL);
    }
    status = hfr_recv(comm, output, count, type, rank - 1, 0, WAIT, NULL);
    return status ? status : hfr_send(comm, output, count, type, rank - 1, 0, WAIT, NULL);
}

static hfr_status call(hfr_comm *comm, const struct order *order, void *input, void *output,
                       hfr_dtype type, uint32_t rank, uint32_t ranks)
{
    size_t count = order->bytes / (type == HFR_FLOAT32 ? 4 : 2), block = count / ranks;

    if (is(order, "allreduce"))
        return hfr_allreduce(comm, input, count, type, HFR_SUM, WAIT, NULL);
    if (is(order, "broadcast"))
        return hfr_broadcast(comm, input, count, type, 0, WAIT, NULL);
    if (is(order, "allgather"))
        return hfr_allgather(comm, input, output, block, type, WAIT, NULL);
    if (is(order, "reduce_scatter"))
        return hfr_reduce_scatter(comm, input, output, block, type, HFR_SUM, WAIT, NULL);
    if (is(order, "alltoall"))
        return hfr_alltoall(comm, input, output, block, type, WAIT, NULL);
    if (is(order, "reduce"))
        return hfr_reduce(comm, input, count, type, HFR_SUM, 0, WAIT, NULL);
    if (is(order, "gather"))
        return hfr_gather(comm, input, rank ? NULL : output, block, type, 0, WAIT, NULL);
    if (is(order, "scatter"))
        return hfr_scatter(comm, rank ? NULL : input, output, block, type, 0, WAIT, NULL);
    if (is(order, "barrier"))
        return hfr_barrier(comm, WAIT, NULL);
    return round_trip(comm, input, output, count, type, rank);
}

int main(int argc, char **argv)
{
    hfr_comm *comm = NULL;
    uint32_t rank, ranks;
    FILE *file;
    struct order order;
    struct buffer inputs[2] = { { NULL, 0 }, { NULL, 0 } };
    struct buffer outputs[2] = { { NULL, 0 }, { NULL, 0 } };

    if (argc != 3)
        return EXIT_FAILURE;
    if (hfr_init_from_environment(&comm) || hfr_rank(comm, &rank) || hfr_world_size(comm, &ranks))
        fail();
    file = orders(argv[1], argv[2], (int)rank);
    while (next(file, &order)) {
        hfr_dtype type = !strcmp(order.type, "float32")    ? HFR_FLOAT32
                         : !strcmp(order.type, "bfloat16") ? HFR_BFLOAT16
                                                           : HFR_FLOAT16;
        int registered = !strcmp(order.kind, "registered");
        void *input, *output;
        double started, seconds;

        if (!known(&order)) {
            fprintf(file, "unknown operation\n");
            continue;
        }
        input = output = reserve(comm, &inputs[registered], order.bytes, registered);

        if (!in_place(&order)) {
            output = reserve(comm, &outputs[registered], order.bytes, registered);
            memset(output, 0, order.bytes);
        }
        fill(input, &order, rank, ranks);
        if (hfr_barrier(comm, WAIT, NULL))
            fail();
        started = now();
        for (long at = 0; at < order.count; at++)
            if (call(comm, &order, input, output, type, rank, ranks))
                fail();
        seconds = now() - started;
        if (order.check && !right(output, &order, rank, ranks))
            fprintf(file, "wrong result\n");
        else
            fprintf(file, "ok %.9f\n", seconds);
    }
    return hfr_close(comm, 5.0) ? EXIT_FAILURE : EXIT_SUCCESS;
}
