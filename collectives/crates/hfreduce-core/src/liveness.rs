//! Failure detection by silence. Time is passed in as milliseconds; no clock is read here.
//!
//! A process that was stopped must not suspect its peers when it resumes: a gap between two of its
//! own checks resets all timers.

/// The time of the last message of each peer.
#[derive(Debug, Clone)]
pub struct Liveness {
    last_message_ms: Vec<u64>,
    looked_ms: u64,
    timeout_ms: u64,
}

impl Liveness {
    /// Starts as if all `peers` had sent a message at `now_ms`.
    pub fn new(peers: usize, timeout_ms: u64, now_ms: u64) -> Self {
        Self { last_message_ms: vec![now_ms; peers], looked_ms: now_ms, timeout_ms }
    }

    /// Records a message of a peer.
    #[inline]
    pub fn record_message(&mut self, peer: usize, now_ms: u64) {
        self.last_message_ms[peer] = now_ms;
    }

    /// The time of the last message of a peer.
    #[inline]
    pub fn last_message_ms(&self, peer: usize) -> u64 {
        self.last_message_ms[peer]
    }

    /// Returns the first peer that has been silent for the timeout, and the length of its silence.
    pub fn look(&mut self, now_ms: u64) -> Option<(usize, u64)> {
        let own_gap_ms = now_ms.saturating_sub(self.looked_ms);
        self.looked_ms = now_ms;
        if own_gap_ms > self.timeout_ms / 2 {
            self.last_message_ms.fill(now_ms);
            return None;
        }
        self.last_message_ms
            .iter()
            .map(|message_ms| now_ms.saturating_sub(*message_ms))
            .enumerate()
            .find(|(_, silent_ms)| *silent_ms >= self.timeout_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_peer_is_reported() {
        let mut liveness = Liveness::new(3, 1000, 0);
        for now_ms in (100..=900).step_by(100) {
            liveness.record_message(0, now_ms);
            liveness.record_message(2, now_ms);
            assert_eq!(liveness.look(now_ms), None);
        }
        assert_eq!(liveness.look(1000), Some((1, 1000)));
    }

    #[test]
    fn after_a_stop_of_this_process_the_timeouts_of_all_peers_restart() {
        let mut liveness = Liveness::new(1, 1000, 0);
        assert_eq!(liveness.look(60_000), None);
        assert_eq!(liveness.look(60_400), None);
        assert_eq!(liveness.look(60_800), None);
        assert_eq!(liveness.look(61_200), Some((0, 1200)));
    }
}
