//! The operations by name, for the tests.

use std::time::Duration;

use hfreduce_engine::{
    Buffer, Call, CollectiveError, Communicator, DType, Kind, ReduceOp as Op, Work,
};

type Started = Result<Work, CollectiveError>;

/// A communicator that starts each operation by a method.
pub trait Calls {
    fn start(&self, call: Call<'_>) -> Started;

    fn allreduce(
        &self,
        input: Buffer,
        dtype: DType,
        op: Op,
        shape: u64,
        timeout: Duration,
        lazy: bool,
    ) -> Started {
        self.start(Call { input, op, shape, ..Call::new(Kind::Allreduce, dtype, timeout, lazy) })
    }

    fn broadcast(
        &self,
        input: Buffer,
        dtype: DType,
        root: u32,
        timeout: Duration,
        lazy: bool,
    ) -> Started {
        self.start(Call { input, root, ..Call::new(Kind::Broadcast, dtype, timeout, lazy) })
    }

    fn reduce(
        &self,
        input: Buffer,
        dtype: DType,
        op: Op,
        root: u32,
        timeout: Duration,
        lazy: bool,
    ) -> Started {
        self.start(Call { input, op, root, ..Call::new(Kind::Reduce, dtype, timeout, lazy) })
    }

    fn allgather(
        &self,
        input: Buffer,
        output: Buffer,
        dtype: DType,
        timeout: Duration,
        lazy: bool,
    ) -> Started {
        self.start(Call { input, output, ..Call::new(Kind::Allgather, dtype, timeout, lazy) })
    }

    fn reduce_scatter(
        &self,
        input: Buffer,
        output: Buffer,
        dtype: DType,
        op: Op,
        timeout: Duration,
        lazy: bool,
    ) -> Started {
        self.start(Call {
            input,
            output,
            op,
            ..Call::new(Kind::ReduceScatter, dtype, timeout, lazy)
        })
    }

    fn gather(
        &self,
        input: Buffer,
        output: Buffer,
        dtype: DType,
        root: u32,
        timeout: Duration,
        lazy: bool,
    ) -> Started {
        self.start(Call { input, output, root, ..Call::new(Kind::Gather, dtype, timeout, lazy) })
    }

    fn scatter(
        &self,
        input: Buffer,
        output: Buffer,
        dtype: DType,
        root: u32,
        timeout: Duration,
        lazy: bool,
    ) -> Started {
        self.start(Call { input, output, root, ..Call::new(Kind::Scatter, dtype, timeout, lazy) })
    }

    #[allow(clippy::too_many_arguments)] // Input and output, each with its counts.
    fn alltoall(
        &self,
        input: Buffer,
        output: Buffer,
        sends: &[usize],
        receives: &[usize],
        dtype: DType,
        timeout: Duration,
        lazy: bool,
    ) -> Started {
        let counts = [sends, receives];
        self.start(Call {
            input,
            output,
            counts,
            ..Call::new(Kind::Alltoall, dtype, timeout, lazy)
        })
    }

    fn send(&self, input: Buffer, dtype: DType, peer: u32, tag: u64, timeout: Duration) -> Started {
        let peer = Some(peer);
        self.start(Call { input, peer, tag, ..Call::new(Kind::Send, dtype, timeout, false) })
    }

    fn recv(&self, input: Buffer, dtype: DType, peer: u32, tag: u64, timeout: Duration) -> Started {
        let peer = Some(peer);
        self.start(Call { input, peer, tag, ..Call::new(Kind::Recv, dtype, timeout, false) })
    }

    fn recv_any(&self, input: Buffer, dtype: DType, tag: u64, timeout: Duration) -> Started {
        self.start(Call { input, tag, ..Call::new(Kind::Recv, dtype, timeout, false) })
    }

    fn barrier(&self, timeout: Duration, lazy: bool) -> Started {
        self.start(Call::new(Kind::Barrier, DType::U8, timeout, lazy))
    }
}

impl Calls for Communicator {
    fn start(&self, call: Call<'_>) -> Started {
        self.call(call)
    }
}
