//! Calls of a rank that wait until the daemon has room for them.

use std::collections::VecDeque;

use crate::protocol::{COLLECTIVES_MAX, MESSAGES_MAX};
use hfreduce_core::Kind;
use hfreduce_engine::driver::Submission;

/// Calls that wait until fewer of their class are in progress, in order within each class.
#[derive(Default)]
pub(crate) struct Queued {
    classes: [VecDeque<Submission>; 3],
    under_way: [usize; 3],
}

impl Queued {
    // One fewer than the daemon accepts: at the maximum it reads no messages, not even Arrived.
    const MOST: [usize; 3] = [COLLECTIVES_MAX - 1, MESSAGES_MAX, MESSAGES_MAX];

    fn class(kind: Kind) -> usize {
        match kind {
            Kind::Send => 1,
            Kind::Recv => 2,
            _ => 0,
        }
    }

    pub fn push(&mut self, call: Submission) {
        self.classes[Self::class(call.operation.fingerprint.kind)].push_back(call);
    }

    /// Takes the next call that may be passed to the daemon, and counts it as in progress.
    pub fn next(&mut self) -> Option<Submission> {
        let may = |class: &usize| self.under_way[*class] < Self::MOST[*class];
        let class = (0..3).filter(may).find(|class| !self.classes[*class].is_empty())?;
        self.under_way[class] += 1;
        self.classes[class].pop_front()
    }

    /// Records the end of a call; true if others may have waited for it.
    pub fn ended(&mut self, kind: Kind) -> bool {
        let class = Self::class(kind);
        self.under_way[class] = self.under_way[class].saturating_sub(1);
        !self.classes[class].is_empty()
    }

    /// The waiting calls.
    pub fn iter(&self) -> impl Iterator<Item = &Submission> {
        self.classes.iter().flatten()
    }

    /// Takes all waiting calls; none remains in progress.
    pub fn take_all(&mut self) -> Vec<Submission> {
        std::mem::take(self).classes.into_iter().flatten().collect()
    }
}
