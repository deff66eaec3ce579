/* hfr_allreduce in rounds: hfreduce SOCKET CREW, joined as the environment says. No Python, no torch. */
#include "rank.h"

#include <hfreduce.h>

#define WAIT 60.0

static void fail(void)
{
    fprintf(stderr, "%s\n", hfr_last_message());
    exit(EXIT_FAILURE);
}

int main(int argc, char **argv)
{
    hfr_comm *comm = NULL;
    uint32_t rank, ranks;
    FILE *file;
    struct order order;
    struct {
        void *memory;
        size_t held;
    } kinds[2] = { { NULL, 0 }, { NULL, 0 } };

    if (argc != 3)
        return EXIT_FAILURE;
    if (hfr_init_from_environment(&comm) || hfr_rank(comm, &rank) || hfr_world_size(comm, &ranks))
        fail();
    file = orders(argv[1], argv[2], (int)rank);
    while (next(file, &order)) {
        hfr_dtype type = !strcmp(order.type, "float32")    ? HFR_FLOAT32
                         : !strcmp(order.type, "bfloat16") ? HFR_BFLOAT16
                                                           : HFR_FLOAT16;
        size_t count = order.bytes / (type == HFR_FLOAT32 ? 4 : 2);
        double begun, seconds;

        int registered = !strcmp(order.kind, "registered");
        void **memory = &kinds[registered].memory;

        if (order.bytes > kinds[registered].held) {
            if (registered) {
                if (hfr_free(comm, *memory) || hfr_alloc(comm, order.bytes, memory))
                    fail();
            } else {
                free(*memory);
                *memory = aligned_alloc(4096, order.bytes);
                if (!*memory)
                    die("memory");
            }
            kinds[registered].held = order.bytes;
        }
        fill(*memory, &order);
        if (hfr_barrier(comm, WAIT, NULL))
            fail();
        begun = now();
        for (long call = 0; call < order.count; call++)
            if (hfr_allreduce(comm, *memory, count, type, HFR_SUM, WAIT, NULL))
                fail();
        seconds = now() - begun;
        if (order.check && !right(*memory, &order, ranks))
            fprintf(file, "no right result\n");
        else
            fprintf(file, "ok %.9f\n", seconds);
    }
    return hfr_close(comm, 5.0) ? EXIT_FAILURE : EXIT_SUCCESS;
}
