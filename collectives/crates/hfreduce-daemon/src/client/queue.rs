//! Calls of a rank that wait until the daemon has room for them.

use std::collections::VecDeque;

use crate::protocol::{COLLECTIVES_MAX, MESSAGES_MAX};
use hfreduce_core::Kind;
use hfreduce_engine::driver::Submission;

/// Calls that wait until fewer of their class are under way, in order within each class.
#[derive(Default)]
pub(crate) struct Queued {
    classes: [VecDeque<Submission>; 3],
    under_way: [usize; 3],
}

impl Queued {
    // One fewer than the daemon takes: with as many it hears nothing, of what has arrived neither.
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

    /// The next call that may be handed over, counted as under way.
    pub fn next(&mut self) -> Option<Submission> {
        let may = |class: &usize| self.under_way[*class] < Self::MOST[*class];
        let class = (0..3).filter(may).find(|class| !self.classes[*class].is_empty())?;
        self.under_way[class] += 1;
        self.classes[class].pop_front()
    }

    /// A call is not under way any more; true if others may have waited for that.
    pub fn ended(&mut self, kind: Kind) -> bool {
        let class = Self::class(kind);
        self.under_way[class] = self.under_way[class].saturating_sub(1);
        !self.classes[class].is_empty()
    }

    /// Those that wait.
    pub fn iter(&self) -> impl Iterator<Item = &Submission> {
        self.classes.iter().flatten()
    }

    /// Takes all of them; nothing is under way any more.
    pub fn take_all(&mut self) -> Vec<Submission> {
        std::mem::take(self).classes.into_iter().flatten().collect()
    }
}
