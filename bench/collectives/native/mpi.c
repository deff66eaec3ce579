/* MPI collectives in rounds: mpirun -n RANKS mpi SOCKET GROUP
 *
 * Allreduces and reduces are in place. The standard has no bfloat16: it is an operation of the user's, as MPI's users write
 * it, and compiled for this machine. */
#include "rank.h"

#include <mpi.h>

static void add_bfloat16(void *input, void *output, int *count, MPI_Datatype *type)
{
    const uint16_t *more = input;
    uint16_t *sum = output;

    (void)type;
    for (int at = 0; at < *count; at++) {
        uint32_t a = (uint32_t)more[at] << 16, b = (uint32_t)sum[at] << 16;
        float first, second;

        memcpy(&first, &a, sizeof first);
        memcpy(&second, &b, sizeof second);
        first += second;
        memcpy(&a, &first, sizeof a);
        sum[at] = (uint16_t)((a + 0x7FFFu + ((a >> 16) & 1u)) >> 16); /* to nearest even */
    }
}

static void *reserve(void *memory, size_t held, size_t bytes)
{
    if (bytes <= held)
        return memory;
    free(memory);
    memory = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    if (!memory)
        die("memory");
    return memory;
}

static void round_trip(void *input, void *output, int count, MPI_Datatype type, int rank)
{
    if (rank % 2 == 0) {
        MPI_Send(input, count, type, rank + 1, 0, MPI_COMM_WORLD);
        MPI_Recv(output, count, type, rank + 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        MPI_Recv(output, count, type, rank - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(output, count, type, rank - 1, 0, MPI_COMM_WORLD);
    }
}

static void call(const struct order *order, void *input, void *output, MPI_Op add, int rank,
                 int ranks)
{
    int wide = !strcmp(order->type, "float32");
    int count = (int)(order->bytes / (wide ? 4 : 2)), block = count / ranks;
    MPI_Datatype type = wide ? MPI_FLOAT : MPI_UINT16_T;
    MPI_Op sum = wide ? MPI_SUM : add;

    if (is(order, "allreduce"))
        MPI_Allreduce(MPI_IN_PLACE, input, count, type, sum, MPI_COMM_WORLD);
    else if (is(order, "broadcast"))
        MPI_Bcast(input, count, type, 0, MPI_COMM_WORLD);
    else if (is(order, "allgather"))
        MPI_Allgather(input, block, type, output, block, type, MPI_COMM_WORLD);
    else if (is(order, "reduce_scatter"))
        MPI_Reduce_scatter_block(input, output, block, type, sum, MPI_COMM_WORLD);
    else if (is(order, "alltoall"))
        MPI_Alltoall(input, block, type, output, block, type, MPI_COMM_WORLD);
    else if (is(order, "reduce"))
        MPI_Reduce(rank ? input : MPI_IN_PLACE, rank ? NULL : input, count, type, sum, 0,
                   MPI_COMM_WORLD);
    else if (is(order, "gather"))
        MPI_Gather(input, block, type, output, block, type, 0, MPI_COMM_WORLD);
    else if (is(order, "scatter"))
        MPI_Scatter(input, block, type, output, block, type, 0, MPI_COMM_WORLD);
    else if (is(order, "barrier"))
        MPI_Barrier(MPI_COMM_WORLD);
    else
        round_trip(input, output, count, type, rank);
}

int main(int argc, char **argv)
{
    int rank, ranks;
    MPI_Op add;
    FILE *file;
    struct order order;
    void *input = NULL, *other = NULL;
    size_t held = 0;

    MPI_Init(&argc, &argv);
    if (argc != 3)
        return EXIT_FAILURE;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Op_create(add_bfloat16, 1, &add);
    file = orders(argv[1], argv[2], rank);
    while (next(file, &order)) {
        void *output;
        double started, seconds;

        if (!known(&order) || strcmp(order.kind, "private")
            || (strcmp(order.type, "float32") && strcmp(order.type, "bfloat16"))) {
            fprintf(file, "unknown operation, type or memory\n");
            continue;
        }
        input = reserve(input, held, order.bytes);
        other = reserve(other, held, order.bytes);
        held = order.bytes > held ? order.bytes : held;
        output = in_place(&order) ? input : other;
        if (output != input)
            memset(output, 0, order.bytes);
        fill(input, &order, (unsigned)rank, (unsigned)ranks);
        MPI_Barrier(MPI_COMM_WORLD);
        started = now();
        for (long at = 0; at < order.count; at++)
            call(&order, input, output, add, rank, ranks);
        seconds = now() - started;
        if (order.check && !right(output, &order, (unsigned)rank, (unsigned)ranks))
            fprintf(file, "wrong result\n");
        else
            fprintf(file, "ok %.9f\n", seconds);
    }
    MPI_Op_free(&add);
    MPI_Finalize();
    return EXIT_SUCCESS;
}
