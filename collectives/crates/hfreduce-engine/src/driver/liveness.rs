//! Heartbeats of the ranks of the node and of tree neighbors: detects the silent ones.

use std::time::{Duration, Instant};

use super::fault::Fault;
use super::node::Node;
use super::tree_links::TreeLinks;
use hfreduce_core::error::ErrorKind;
use hfreduce_core::liveness::Liveness;

/// See the module's text. Peers are the ranks of the node, then the links.
pub(super) struct Heartbeats {
    live: Liveness,
    /// By local rank: its last count of heartbeats.
    beats: Vec<u64>,
    started: Instant,
    /// Whether the silence of peers counts: all ranks have connected.
    pub is_active: bool,
}

impl Heartbeats {
    pub fn new(locals: usize, links: usize, timeout: Duration) -> Self {
        Self {
            live: Liveness::new(locals + links, timeout.as_millis() as u64, 0),
            beats: vec![0; locals],
            started: Instant::now(),
            is_active: false,
        }
    }

    /// Checks the heartbeats of all peers: a fault if one is silent.
    pub fn check(
        &mut self,
        node: &Node,
        tree: Option<&mut TreeLinks>,
        now: Instant,
    ) -> Result<(), Fault> {
        let now_ms = now.duration_since(self.started).as_millis() as u64;
        let locals = self.beats.len();
        for local in 0..locals {
            let beats = node.shm.beats(local);
            let own = local == node.local();
            if beats != self.beats[local] || own || node.shm.closed_at(local).is_some() {
                self.beats[local] = beats;
                self.live.record_message(local, now_ms);
            }
        }
        let mut ranks = node.identity().locals().to_vec();
        if let Some(tree) = tree {
            for (link, received) in tree.poll_received(node).into_iter().enumerate() {
                if received || !self.is_active {
                    self.live.record_message(locals + link, now_ms);
                }
            }
            ranks.extend(tree.links.iter().map(|link| link.peer_rank));
        }
        let Some((peer, silent_ms)) = self.live.look(now_ms).filter(|_| self.is_active) else {
            return Ok(());
        };
        let detail = format!(
            "no heartbeat for {:.1} s; the process is stopped, or the machine or its link is down",
            silent_ms as f64 / 1000.0
        );
        Err(node.fault(ErrorKind::PeerStalled, ranks[peer], detail))
    }

    /// Time of the last message of a peer.
    pub fn last_message_at(&self, peer: usize) -> Instant {
        self.started + Duration::from_millis(self.live.last_message_ms(peer))
    }
}
