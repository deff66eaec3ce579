//! Fuzz tests: the state machines must not panic or grow without bound under events that no correct
//! peer sends. As in the driver, a run ends at the first violation.

use hfreduce_plan::{NodePlace, Plan};
use proptest::prelude::*;

use super::credit::CLASSES;
use super::matching::{ANY_RANK, Envelope, OFFERS_MAX, PairAction, Pairs, TransferId};
use super::reconfigure::{Call, Message, Reconfiguration, RejectedList, Rejection, Start, Step};
use super::tree::{Action, DataHead, Place, TreeCore};
use super::{Determinism, Fingerprint, Flows, Geometry, Kind, Stage};
use crate::error::ErrorKind;

const WINDOW: u32 = 4;
const SLOT_BYTES: usize = 16 << 10;

fn fingerprint(kind: u8, count: u64) -> Fingerprint {
    let modes = Determinism::from_code(kind / 6);
    let kind = Kind::ALL[usize::from(kind) % 6];
    Fingerprint { kind, dtype: 0, element_bytes: 2, op: 0, root: 1, count, shape: 0, modes }
}

#[derive(Clone, Debug)]
enum Happening {
    Call(u8, u64),
    Activate,
    Ready,
    Sent,
    Head { link: usize, sequence: u64, chunk: u32, tree: usize, up: bool, honest: bool },
    Payload(usize),
    Credits(usize, [u8; CLASSES]),
    Compare(u64, u8),
}

fn happening() -> impl Strategy<Value = Happening> {
    let head = (0..4_usize, 0..4_u64, 0..6_u32, 0..3_usize, any::<bool>(), any::<bool>());
    prop_oneof![
        2 => (0..24_u8, 0..40_000_u64).prop_map(|(kind, count)| Happening::Call(kind, count)),
        4 => Just(Happening::Activate),
        4 => Just(Happening::Ready),
        4 => Just(Happening::Sent),
        6 => head.prop_map(|(link, sequence, chunk, tree, up, honest)| {
            Happening::Head { link, sequence, chunk, tree, up, honest }
        }),
        6 => (0..16_usize).prop_map(Happening::Payload),
        2 => (0..4_usize, any::<[u8; CLASSES]>()).prop_map(|(link, counts)| {
            Happening::Credits(link, counts.map(|count| count % 3))
        }),
        1 => (0..4_u64, 0..6_u8).prop_map(|(sequence, kind)| Happening::Compare(sequence, kind)),
    ]
}

/// A node with its neighbors, and the state that its driver keeps.
struct Node {
    core: TreeCore,
    calls: Vec<Fingerprint>,
    next: (u64, u32),
    active: Vec<(u64, u32)>,
    sending: Vec<(u64, u32)>,
    receiving: Vec<(usize, DataHead, Place)>,
}

impl Node {
    fn new(nodes: usize, me: usize) -> Self {
        let places: Vec<NodePlace> =
            (0..nodes).map(|node| NodePlace::new(format!("n{node}"), "z")).collect();
        let plan = Plan::new(&places).unwrap();
        let core = TreeCore::new(Flows::new(&plan, me % nodes), (0, 1), WINDOW);
        let (calls, active, sending, receiving) = (vec![], vec![], vec![], vec![]);
        Self { core, calls, next: (0, 0), active, sending, receiving }
    }

    fn links(&self) -> usize {
        self.core.flows().peers().len()
    }

    /// Returns false at the first violation.
    fn take(&mut self, happening: Happening, nodes: usize) -> bool {
        match happening {
            Happening::Call(kind, count) => {
                let fingerprint = fingerprint(kind, count);
                self.calls.push(fingerprint);
                self.core.start(self.calls.len() as u64 - 1, fingerprint).is_ok()
            }
            Happening::Activate => self.activate(nodes),
            Happening::Ready => {
                if let Some(key) = self.active.iter().find(|key| self.core.wants_local(**key)) {
                    self.core.local_ready(*key);
                }
                true
            }
            Happening::Sent => {
                if let Some(key) = self.sending.pop() {
                    self.core.sent(key);
                }
                true
            }
            Happening::Head { link, sequence, chunk, tree, up, honest } => {
                let link = link % self.links();
                let call = self.calls.get(sequence as usize).copied().filter(|_| honest);
                let fingerprint = call.unwrap_or_else(|| fingerprint(1, sequence));
                let cut = Geometry::new(&fingerprint, nodes, SLOT_BYTES);
                let stage = if up { Stage::Up } else { Stage::Down };
                let chunk_at = cut.chunk(chunk % cut.chunks());
                let (chunk, tree, bytes) = match honest {
                    true => (chunk_at.index, chunk_at.tree, chunk_at.bytes_in(stage)),
                    false => (chunk, tree, chunk as usize),
                };
                let head = DataHead { sequence, chunk, tree, stage, bytes, fingerprint };
                match self.core.place(link, &head) {
                    Ok(place) => self.receiving.push((link, head, place)),
                    Err(_) => return false,
                }
                true
            }
            Happening::Payload(at) => {
                if self.receiving.is_empty() {
                    return true;
                }
                let (link, head, place) = self.receiving.remove(at % self.receiving.len());
                self.core.arrived(link, &head, place).is_ok()
            }
            Happening::Credits(link, counts) => {
                self.core.credits(link % self.links(), counts).is_ok()
            }
            Happening::Compare(sequence, kind) => {
                self.core.compare(sequence, fingerprint(kind, sequence)).is_ok()
            }
        }
    }

    fn activate(&mut self, nodes: usize) -> bool {
        let (sequence, index) = self.next;
        let Some(fingerprint) = self.calls.get(sequence as usize) else { return true };
        let cut = Geometry::new(fingerprint, nodes, SLOT_BYTES);
        if index >= cut.chunks() {
            self.next = (sequence + 1, 0);
            return true;
        }
        self.next = (sequence, index + 1);
        self.active.push((sequence, index));
        let chunk = cut.chunk(index);
        let root = chunk.root().map(|rank| rank as usize % nodes);
        self.core.activate(sequence, chunk, root).is_ok()
    }

    /// Executes the actions of the core; their number is bounded.
    fn act(&mut self) {
        let mut actions = 0;
        while let Some(action) = self.core.poll() {
            actions += 1;
            assert!(actions <= 64, "one event produces few actions");
            if let Action::Send { key, .. } = action {
                self.sending.push(key);
            }
        }
        for link in 0..self.links() {
            let credits = self.core.take_returns(link);
            assert!(credits.iter().all(|count| u32::from(*count) <= WINDOW), "{credits:?}");
        }
        let slots = self.receiving.iter().filter(|(_, _, place)| *place != Place::Direct).count();
        assert!(slots <= self.links() * CLASSES * WINDOW as usize, "{slots} slots");
        let _ = self.core.waiting();
    }
}

fn envelope(kind: u8, tag: u64, bytes: u64) -> Envelope {
    let kind = if kind.is_multiple_of(2) { Kind::Send } else { Kind::Recv };
    let fingerprint = Fingerprint { kind, ..fingerprint(0, bytes) };
    Envelope { tag, bytes, fingerprint }
}

fn message() -> impl Strategy<Value = Message> {
    let infos = proptest::collection::vec("[a-c]", 0..4);
    prop_oneof![
        (0..3_u64, 0..2_u64, 0..3_u64, 0..3_u64).prop_map(
            |(list_digest, caller, attempt, rejected)| {
                let why =
                    Rejection { kind: ErrorKind::PeerDied, member: None, detail: String::new() };
                let rejected = vec![RejectedList { list_digest: rejected, why }];
                Message::Call(Call { list_digest, caller, attempt, rejected })
            }
        ),
        (any::<u32>(), "[a-c]").prop_map(|(epoch, info)| Message::Join { epoch, info }),
        "[a-c]".prop_map(|list| Message::Differ { list }),
        (0..5_usize).prop_map(|member| Message::Wait { member }),
        (any::<u32>(), 0..3_u64, infos).prop_map(|(epoch, nonce, infos)| Message::Welcome {
            epoch,
            nonce,
            infos
        }),
        (0..5_usize).prop_map(|member| Message::Reject(Rejection {
            kind: if member.is_multiple_of(2) { ErrorKind::Mismatch } else { ErrorKind::PeerDied },
            member: Some(member),
            detail: String::new(),
        })),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_tree_survives_any_sequence(
        nodes in 2..7_usize,
        me in 0..7_usize,
        story in proptest::collection::vec(happening(), 1..120),
    ) {
        let mut node = Node::new(nodes, me);
        for happening in story {
            let fine = node.take(happening, nodes);
            node.act();
            if !fine {
                break;
            }
        }
    }

    #[test]
    fn pairs_survive_any_sequence(
        story in proptest::collection::vec((0..6_u8, 0..4_u32, 0..4_u64, 0..5_u64, 0..4_u8), 1..200),
    ) {
        let mut pairs = Pairs::default();
        let mut granted = 0_usize;
        for (number, (what, peer, message, bytes, kind)) in story.into_iter().enumerate() {
            let (eager, kind) = (kind > 1, kind % 2);
            let ticket = TransferId { operation: number as u64, transfer: 0 };
            let fine = match what {
                0 => { pairs.send(peer, ticket, envelope(0, message, bytes)); true }
                1 if peer == 3 => {
                    pairs.receive(ANY_RANK, ticket, envelope(1, message, bytes)).is_ok()
                }
                1 => pairs.receive(peer, ticket, envelope(1, message, bytes)).is_ok(),
                2 => pairs.offered(peer, message, envelope(kind, message, bytes), eager).is_ok(),
                3 => pairs.granted(peer, message).is_ok(),
                4 => pairs.piece(peer, message, bytes).is_ok(),
                _ => { pairs.arrived(peer, message, 0); true }
            };
            while let Some(action) = pairs.poll() {
                granted += usize::from(matches!(action, PairAction::Grant { .. }));
            }
            prop_assert!(granted <= OFFERS_MAX);
            if !fine {
                break;
            }
        }
    }

    #[test]
    fn an_attempt_ends_once_for_any_messages(
        own in 0..4_usize,
        newcomer in any::<bool>(),
        events in proptest::collection::vec((0..8_u64, message(), 0..8_u8), 0..40),
    ) {
        let own = (!newcomer).then_some(own);
        let (list, info) = ("list".to_owned(), "card".to_owned());
        let (list_digest, rejected) = (1, Vec::new());
        let start =
            Start { id: 1, attempt: 1, own, size: 4, list_digest, list, epoch: 3, info, nonce: 9, rejected };
        let mut reconfigure = Reconfiguration::new(start);
        let mut ends = 0;
        let mut sends = 0;
        for (line, message, event) in events {
            match event {
                0 => reconfigure.disconnected(line, ErrorKind::PeerDied, "gone"),
                1 => reconfigure.connected(1 + line as usize % 3),
                _ => reconfigure.received(line, message),
            }
            while let Some(step) = reconfigure.poll() {
                sends += usize::from(matches!(step, Step::Send { .. }));
                ends += usize::from(matches!(step, Step::End(_)));
            }
        }
        reconfigure.timed_out();
        while let Some(step) = reconfigure.poll() {
            ends += usize::from(matches!(step, Step::End(_)));
        }
        prop_assert_eq!(ends, 1);
        prop_assert!(sends < 40 * 8);
    }
}
