//! One point in time that is handed down through every wait of an operation.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// When an operation gives up. There is no "never": every wait ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

/// Far enough for "as long as it takes" and still an end: a day.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl Deadline {
    /// The deadline `timeout` from now; longer ones are cut to a day.
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout.min(LONGEST))
    }

    /// The time that is left, or `None` once it has passed.
    pub fn remaining(&self) -> Option<Duration> {
        self.0.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }

    /// True once no time is left.
    pub fn passed(&self) -> bool {
        self.remaining().is_none()
    }

    /// The instant itself, for `tokio::time::timeout_at` and its like.
    pub fn instant(&self) -> Instant {
        self.0
    }

    /// The earlier of this deadline and `timeout` from now.
    pub fn within(&self, timeout: Duration) -> Self {
        Self(self.0.min(Instant::now() + timeout.min(LONGEST)))
    }
}

/// A stream whose every read and write is bounded by what is left of one deadline, so that a peer
/// that sends a byte now and then cannot hold a conversation open. Changes the stream's time-outs.
pub struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
}

impl<'a> Timed<'a> {
    /// All that goes over `stream` ends at `deadline`.
    pub fn new(stream: &'a TcpStream, deadline: Deadline) -> Self {
        Self { stream, deadline }
    }

    fn left(&self) -> io::Result<Duration> {
        self.deadline.remaining().ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        let mut stream = self.stream;
        stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_in_the_past_has_nothing_left() {
        assert_eq!(Deadline::after(Duration::ZERO).remaining(), None);
        assert!(Deadline::after(Duration::ZERO).passed());
    }

    #[test]
    fn within_never_extends() {
        let soon = Deadline::after(Duration::from_millis(5));
        assert_eq!(soon.within(Duration::from_secs(60)), soon);
        let late = Deadline::after(Duration::from_secs(60));
        assert!(late.within(Duration::from_millis(5)) < late);
    }

    #[test]
    fn the_longest_wait_is_a_day() {
        assert!(Deadline::after(Duration::MAX).remaining().unwrap() <= LONGEST);
    }
}
