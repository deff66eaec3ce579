//! Committer: takes the commits that wait, and executes them in batches over several lanes.
//!
//! Batches in flight are disjoint. A commit that overlaps with one in flight waits, as do later
//! ones that overlap with it, so that no commit starves.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::{self, JoinError, JoinSet};
use tokio::time::Instant;

use super::batch::{Batch, Job, PATIENCE, Shared};
use super::footprint::Footprint;
use super::lane::Lane;
use super::plan::{Counters, counters_of};
use crate::resolver::Resolver;
use crate::watch::Watches;
use crate::{Commit, KvError, Mutation};

/// Maximum number of commits of a batch: larger ones cost as much per commit.
const BATCH_MAX: usize = 200;
/// Maximum bytes of a batch of several commits, for its latency.
const BATCH_BYTES_MAX: usize = 2 << 20;
/// A further batch is sent while others are in flight if this many commits wait.
const BATCH_MIN: usize = 40;
/// Maximum number of batches in flight.
const LANES: usize = 4;
/// Waiting commits that are considered for a batch.
const CONSIDERED_MAX: usize = 1024;
/// Writes of this process that are kept to find conflicts without a request.
const WRITES_MAX: usize = 50_000;
/// Counters that are kept between batches.
const COUNTERS_MAX: usize = 10_000;

pub(crate) struct Committer {
    shared: Arc<Shared>,
    jobs: mpsc::Receiver<Job>,
    waiting: VecDeque<Job>,
    idle: Vec<(usize, Lane)>,
    in_flight: Vec<Option<Footprint>>,
    running: JoinSet<Finished>,
    /// Index of the lane of each running task.
    lanes: HashMap<task::Id, usize>,
    counters: Counters,
    resolver: Resolver,
    watches: Watches,
}

struct Finished {
    index: usize,
    lane: Lane,
    counters: Counters,
    written: Option<(u64, Vec<Vec<u8>>)>,
}

impl Committer {
    pub(crate) fn new(shared: Arc<Shared>, jobs: mpsc::Receiver<Job>, watches: Watches) -> Self {
        let idle = (0..LANES).map(|index| (index, new_lane(&shared))).collect();
        Self {
            shared,
            jobs,
            waiting: VecDeque::new(),
            idle,
            in_flight: std::iter::repeat_with(|| None).take(LANES).collect(),
            running: JoinSet::new(),
            lanes: HashMap::new(),
            counters: Counters::new(),
            resolver: Resolver::new(0, WRITES_MAX),
            watches,
        }
    }

    /// Runs until the store is closed.
    pub(crate) async fn run(mut self) {
        loop {
            let oldest = self.waiting.front().map(|job| job.since + PATIENCE);
            tokio::select! {
                job = self.jobs.recv() => match job {
                    Some(job) => self.waiting.push_back(job),
                    None => return,
                },
                Some(finished) = self.running.join_next_with_id() => match finished {
                    Ok((id, finished)) => {
                        self.lanes.remove(&id);
                        self.finish(finished);
                    }
                    Err(error) => self.replace_lane(&error),
                },
                () = sleep_until(oldest) => self.expire(),
            }
            while let Ok(job) = self.jobs.try_recv() {
                self.waiting.push_back(job);
            }
            while self.dispatch() {}
        }
    }

    /// A batch has panicked: its callers see a closed channel, and its counters are read again.
    fn replace_lane(&mut self, error: &JoinError) {
        tracing::error!(%error, "a batch of commits has panicked");
        let Some(index) = self.lanes.remove(&error.id()) else { return };
        if let Some(slot) = self.in_flight.get_mut(index) {
            *slot = None;
        }
        self.idle.push((index, new_lane(&self.shared)));
    }

    fn finish(&mut self, finished: Finished) {
        let Finished { index, lane, counters, written } = finished;
        if let Some(slot) = self.in_flight.get_mut(index) {
            *slot = None;
        }
        self.idle.push((index, lane));
        if let Some((revision, keys)) = written {
            self.watches.written(revision, &keys);
            self.resolver.record(revision, keys);
        }
        self.counters.extend(counters);
        while self.counters.len() > COUNTERS_MAX {
            self.counters.pop_first();
        }
    }

    fn expire(&mut self) {
        while self.waiting.front().is_some_and(|job| job.since.elapsed() >= PATIENCE) {
            let Some(job) = self.waiting.pop_front() else { return };
            let detail = format!("the commit has waited for {PATIENCE:?}");
            job.reply(Err(self.shared.members.unavailable(detail)));
        }
    }

    /// Starts a batch, if a lane is idle and enough commits wait.
    fn dispatch(&mut self) -> bool {
        let busy = self.idle.len() < LANES;
        if self.waiting.is_empty() || (busy && self.waiting.len() < BATCH_MIN) {
            return false;
        }
        let Some((index, mut lane)) = self.idle.pop() else { return false };
        let (jobs, footprint) = self.choose();
        if jobs.is_empty() {
            self.idle.push((index, lane));
            return false;
        }
        let keys = jobs.iter().flat_map(|job| counters_of(&job.commit));
        let counters = keys.filter_map(|key| self.counters.remove_entry(key)).collect();
        if let Some(slot) = self.in_flight.get_mut(index) {
            *slot = Some(footprint);
        }
        let shared = Arc::clone(&self.shared);
        let task = self.running.spawn(async move {
            let mut batch = Batch::new(jobs, counters);
            let written = batch.run(&shared, &mut lane).await;
            Finished { index, lane, counters: batch.counters, written }
        });
        self.lanes.insert(task.id(), index);
        true
    }

    /// Takes commits that overlap neither with those in flight nor with older waiting ones.
    fn choose(&mut self) -> (Vec<Job>, Footprint) {
        let (mut chosen, mut footprint) = (Vec::new(), Footprint::default());
        let (mut held, mut skipped) = (Footprint::default(), VecDeque::new());
        let (mut operations, mut bytes) = (0, 0);
        for _ in 0..CONSIDERED_MAX.min(self.waiting.len()) {
            let Some(job) = self.waiting.pop_front() else { break };
            if matches!(self.resolver.check(&job.commit), Err(KvError::Conflict)) {
                job.reply(Err(KvError::Conflict));
                continue;
            }
            let busy = self.in_flight.iter().flatten().any(|it| it.overlaps(&job.commit));
            if busy || held.overlaps(&job.commit) {
                held.add(&job.commit);
                skipped.push_back(job);
                continue;
            }
            let cost = cost(&job.commit);
            let full = operations + cost.0 > self.shared.bounds.operations
                || bytes + cost.1 > BATCH_BYTES_MAX.min(self.shared.bounds.bytes);
            if !chosen.is_empty() && full {
                self.waiting.push_front(job);
                break;
            }
            (operations, bytes) = (operations + cost.0, bytes + cost.1);
            footprint.add(&job.commit);
            chosen.push(job);
            if chosen.len() == BATCH_MAX {
                break;
            }
        }
        while let Some(job) = skipped.pop_back() {
            self.waiting.push_front(job);
        }
        (chosen, footprint)
    }
}

/// A lane with a name that no other has had.
fn new_lane(shared: &Shared) -> Lane {
    let name = format!("lane/{:032x}", rand::random::<u128>());
    Lane::new(Arc::clone(&shared.members), shared.rows.clone(), &name)
}

/// Upper bounds of the operations and bytes of a commit in a request.
fn cost(commit: &Commit) -> (usize, usize) {
    let counters = counters_of(commit).count();
    let guards = commit.read_keys.len() + commit.read_ranges.len() + commit.seen.len() + counters;
    // A put inside a cleared range cuts it in two.
    let writes = 2 * commit.mutations.len() + commit.bounded_adds.len();
    let guarded: usize =
        commit.seen.keys().chain(&commit.read_keys).map(|key| key.len() + 200).sum();
    let written: usize = commit.mutations.iter().map(mutation_bytes).sum();
    (guards.max(writes) + 1, guarded + written + 200 * (counters + 1))
}

fn mutation_bytes(mutation: &Mutation) -> usize {
    match mutation {
        Mutation::Set { key, value } => key.len() + value.len() + 100,
        Mutation::Clear { key } | Mutation::Add { key, .. } => key.len() + 100,
        Mutation::ClearRange { range } => range.start.len() + range.end.len() + 200,
        Mutation::SetStamped { prefix, suffix, value } => {
            prefix.len() + suffix.len() + value.len() + 200
        }
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
