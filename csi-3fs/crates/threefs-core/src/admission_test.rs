//! Deadlock freedom of admission budgets: replicas of several chains on nodes that admit one
//! request of each class at a time. Every update must complete in any order of events. The network
//! refuses requests beyond a budget, like the service for a caller that times out; refused calls
//! are repeated.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::checksum::Checksum;
use crate::chunk::{ChunkState, ContentChange, StoreUpdate, Which};
use crate::forgotten::InodeRange;
use crate::ids::{
    ChainId, ChainVersion, ChannelId, ChunkVersion, ClientId, Incarnation, InodeId, NodeId,
    RequestTag, TargetId,
};
use crate::message::{Address, ForgetInodes, UpdateRequest};
use crate::routing::PublicState;

const NODES: u32 = 3;
/// All orders of three nodes: each node is head, middle and tail, before and after every other one.
const CHAINS: [[u32; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
const UPDATES: u64 = 60;

#[derive(Default)]
struct Store(BTreeMap<ChunkId, ChunkMeta>, BTreeMap<ChunkId, Bytes>);

impl ChunkMetas for Store {
    fn meta(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.0.get(&chunk).cloned()
    }
    fn version_up_to(&self, chunk: ChunkId) -> Option<ChunkMeta> {
        self.0.range(chunk.first_version()..=chunk).next_back().map(|(_, meta)| meta.clone())
    }
    fn metas(&self, _: Option<ChunkId>, _: ChunkId, _: usize) -> Vec<ChunkMeta> {
        Vec::new()
    }
    fn pending(&self, _: Option<ChunkId>, _: usize) -> Vec<ChunkId> {
        Vec::new()
    }
    fn is_forgotten(&self, _: InodeId) -> bool {
        false
    }
    fn forgotten(&self, _: Option<InodeId>, _: usize) -> Vec<InodeRange> {
        Vec::new()
    }
    fn version_floor(&self) -> ChunkVersion {
        ChunkVersion(0)
    }
    fn last_existing(&self, _: InodeId) -> Option<ChunkMeta> {
        None
    }
}

impl Store {
    fn apply(&mut self, update: &StoreUpdate, payload: &Bytes) -> ChunkState {
        let meta = self.0.entry(update.chunk).or_insert_with(|| ChunkMeta::absent(update.chunk));
        let state = ChunkState {
            version: update.version,
            chain_version: update.chain_version,
            length: payload.len() as u32,
            checksum: Checksum::of(payload),
            removed: false,
            tags: update.tags.clone(),
        };
        meta.pending = Some(state.clone());
        self.1.insert(update.chunk, payload.clone());
        state
    }

    fn commit(&mut self, chunk: ChunkId) -> ChunkState {
        let meta = self.0.get_mut(&chunk).unwrap();
        meta.committed = meta.pending.take().unwrap();
        meta.committed.clone()
    }
}

/// Receiver of the reply to a request.
#[derive(Clone, Copy)]
enum Requester {
    Client(u64),
    Replica(TargetId, CallId),
}

enum Step {
    Deliver(TargetId, Event),
    Send { requester: Requester, node: u32, request: StorageRequest, payload: Bytes },
}

struct Cluster {
    replicas: BTreeMap<TargetId, (Replica, Store)>,
    steps: VecDeque<Step>,
    /// Node and class of each admitted request.
    admitted: BTreeMap<(u32, u8), Token>,
    tokens: BTreeMap<Token, (Requester, (u32, u8))>,
    next_token: u64,
    now: u64,
    waiting: BTreeSet<u64>,
    class_of: fn(&StorageRequest) -> u8,
}

fn target(chain: usize, node: u32) -> TargetId {
    TargetId(chain as u64 * u64::from(NODES) + u64::from(node))
}

impl Cluster {
    fn start(class_of: fn(&StorageRequest) -> u8) -> Self {
        let mut replicas = BTreeMap::new();
        for (number, order) in CHAINS.iter().enumerate() {
            let id = ChainId(number as u32);
            let places = |states: &dyn Fn(u32) -> PublicState| {
                let place = |&node: &u32| ChainTarget {
                    target: target(number, node),
                    node: NodeId(node),
                    state: states(node),
                };
                order.iter().map(place).collect::<Vec<_>>()
            };
            for &node in order {
                let mut config = Config::new(target(number, node), id, Incarnation(1));
                config.call_timeout_ms = 100;
                let (mut replica, store) = (Replica::new(config), Store::default());
                let last = places(&|it| {
                    if it == node { PublicState::LastSrv } else { PublicState::Offline }
                });
                let all = places(&|_| PublicState::Serving);
                for (version, targets) in [(1, last), (2, all)] {
                    let chain = Chain { id, version: ChainVersion(version), targets };
                    replica.handle(Millis(0), Event::Routing(chain), &store, &mut Vec::new());
                }
                let valid_until = Millis(u64::MAX);
                replica.handle(Millis(0), Event::Lease { valid_until }, &store, &mut Vec::new());
                replicas.insert(target(number, node), (replica, store));
            }
        }
        Self {
            replicas,
            steps: VecDeque::new(),
            admitted: BTreeMap::new(),
            tokens: BTreeMap::new(),
            next_token: 0,
            now: 0,
            waiting: (0..UPDATES).collect(),
            class_of,
        }
    }

    /// A client sends a request, or retries it with the same tag; some request to forget inodes.
    fn update(&mut self, client: u64) {
        let number = client as usize % CHAINS.len();
        let node = CHAINS[number][0];
        let payload = Bytes::from(client.to_le_bytes().to_vec());
        let to = Address {
            chain: ChainId(number as u32),
            chain_version: ChainVersion(2),
            target: target(number, node),
        };
        if client % 7 == 6 {
            let inodes = vec![InodeRange::one(InodeId(2 + client))];
            let request = StorageRequest::ForgetInodes(ForgetInodes::of_head(to, inodes));
            let payload = Bytes::new();
            return self.steps.push_back(Step::Send {
                requester: Requester::Client(client),
                node,
                request,
                payload,
            });
        }
        let request = StorageRequest::Update(UpdateRequest {
            to,
            chunk: ChunkId::new(InodeId(1), client as u32 % 24),
            tag: RequestTag {
                client: ClientId::with_incarnation(u128::from(client) << 32, 0),
                channel: ChannelId(1),
                sequence: 1,
            },
            change: ContentChange::Replace,
            payload_checksum: Checksum::of(&payload),
            chunk_bytes: 4096,
        });
        self.steps.push_back(Step::Send {
            requester: Requester::Client(client),
            node,
            request,
            payload,
        });
    }

    fn answer(&mut self, requester: Requester, result: Result<StorageReply, PeerFailure>) {
        match requester {
            Requester::Client(client) if result.is_ok() => drop(self.waiting.remove(&client)),
            Requester::Client(_) => {}
            Requester::Replica(target, call) => {
                let payload = Bytes::new();
                self.steps
                    .push_back(Step::Deliver(target, Event::Answer { call, result, payload }));
            }
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Deliver(target, event) => self.deliver(target, event),
            Step::Send { requester, node, request, payload } => {
                let slot = (node, (self.class_of)(&request));
                if self.admitted.contains_key(&slot) {
                    return self.answer(requester, Err(PeerFailure::Unreachable));
                }
                self.next_token += 1;
                let token = Token(self.next_token);
                self.admitted.insert(slot, token);
                self.tokens.insert(token, (requester, slot));
                let target = request.to().target;
                self.deliver(target, Event::Request { token, request, payload, expires: None });
            }
        }
    }

    fn deliver(&mut self, target: TargetId, event: Event) {
        let mut actions = Vec::new();
        let (replica, store) = self.replicas.get_mut(&target).unwrap();
        replica.handle(Millis(self.now), event, store, &mut actions);
        for action in actions {
            let (_, store) = self.replicas.get_mut(&target).unwrap();
            match action {
                Action::Apply { op, update, payload, prepare, .. } => {
                    if let Some(Prepare { call, node, request, .. }) = prepare {
                        let requester = Requester::Replica(target, call);
                        let request = StorageRequest::Prepare(request);
                        let payload = payload.clone();
                        self.steps.push_back(Step::Send {
                            requester,
                            node: node.0,
                            request,
                            payload,
                        });
                    }
                    let result = Ok(store.apply(&update, &payload));
                    self.steps.push_back(Step::Deliver(
                        target,
                        Event::Applied { op, unsent: false, result },
                    ));
                }
                Action::ReadContent { op, chunk, which: Which::Newest } => {
                    let result = Ok((store.0[&chunk].newest().clone(), store.1[&chunk].clone()));
                    self.steps.push_back(Step::Deliver(target, Event::Content { op, result }));
                }
                Action::Commit { op, chunk, .. } => {
                    let result = Ok(store.commit(chunk));
                    self.steps.push_back(Step::Deliver(target, Event::Committed { op, result }));
                }
                Action::Call { call, node, request, payload, .. } => {
                    let requester = Requester::Replica(target, call);
                    self.steps.push_back(Step::Send { requester, node: node.0, request, payload });
                }
                Action::Reply { token, result } => {
                    let (requester, slot) = self.tokens.remove(&token).unwrap();
                    self.admitted.remove(&slot);
                    self.answer(requester, result.map_err(PeerFailure::Refused));
                }
                Action::ForgetInodes { op, .. } => {
                    let event = Event::InodesForgotten { op, result: Ok(()) };
                    self.steps.push_back(Step::Deliver(target, event));
                }
                Action::RefreshRouting | Action::Alert(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Runs to the end; `false` if an update does not complete within this virtual time.
    fn run(&mut self, mut choices: impl Iterator<Item = usize>) -> bool {
        while self.now < 60_000 {
            if self.waiting.is_empty() {
                return true;
            }
            for client in self.waiting.clone() {
                let result = self.tokens.values().any(
                    |(requester, _)| matches!(requester, Requester::Client(it) if *it == client),
                );
                if !result {
                    self.update(client);
                }
            }
            while !self.steps.is_empty() {
                let at = choices.next().unwrap_or(0) % self.steps.len();
                if let Some(step) = self.steps.remove(at) {
                    self.take(step);
                }
            }
            let next_wakeup =
                self.replicas.values().filter_map(|(replica, _)| replica.next_wakeup()).min();
            self.now =
                next_wakeup.map_or(self.now + 1, |at| at.0.max(self.now + 1)).min(self.now + 20);
            let targets: Vec<TargetId> = self.replicas.keys().copied().collect();
            for target in targets {
                self.deliver(target, Event::Tick);
            }
        }
        false
    }
}

fn seeded(seed: u64) -> impl Iterator<Item = usize> {
    let mut state = seed | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn full_budgets_never_stop_the_chains(seed: u64) {
        let mut cluster = Cluster::start(StorageRequest::class);
        prop_assert!(cluster.run(seeded(seed)), "{} updates never complete", cluster.waiting.len());
        let newest = |target: TargetId| {
            let (_, store) = &cluster.replicas[&target];
            store.0.values().map(|it| (it.chunk, it.committed.version)).collect::<Vec<_>>()
        };
        for number in 0..CHAINS.len() {
            let copies: Vec<Vec<(ChunkId, ChunkVersion)>> =
                (0..NODES).map(|node| newest(target(number, node))).collect();
            prop_assert!(copies.iter().all(|copy| *copy == copies[0] && !copy.is_empty()));
        }
    }
}

/// The reason for the classes: with one budget for all requests, the chains deadlock.
#[test]
fn one_budget_for_all_deadlocks() {
    let mut cluster = Cluster::start(|_| 0);
    assert!(!cluster.run(seeded(1)));
}
