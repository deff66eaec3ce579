//! Deadlines: one point in time that is passed to every wait of an operation.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Time at which an operation times out. Every wait is bounded: a deadline cannot be infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

/// Maximum timeout: one day.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl Deadline {
    /// The deadline `timeout` from now, at most one day.
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout.min(LONGEST))
    }

    /// Time left, or `None` once the deadline has passed.
    pub fn remaining(&self) -> Option<Duration> {
        self.0.checked_duration_since(Instant::now()).filter(|remaining| !remaining.is_zero())
    }

    /// True once the deadline has passed.
    pub fn passed(&self) -> bool {
        self.remaining().is_none()
    }

    /// The deadline as an instant, for example for `tokio::time::timeout_at`.
    pub fn instant(&self) -> Instant {
        self.0
    }

    /// The earlier of this deadline and `timeout` from now.
    pub fn within(&self, timeout: Duration) -> Self {
        Self(self.0.min(Instant::now() + timeout.min(LONGEST)))
    }
}

/// A stream that bounds every read and write by one deadline, so that a peer that sends single
/// bytes slowly cannot keep the exchange open. Changes the stream's timeouts.
pub struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
}

impl<'a> Timed<'a> {
    /// All reads and writes on `stream` end at `deadline`.
    pub fn new(stream: &'a TcpStream, deadline: Deadline) -> Self {
        Self { stream, deadline }
    }

    fn remaining(&self) -> io::Result<Duration> {
        self.deadline.remaining().ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.remaining()?))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.remaining()?))?;
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
    fn a_deadline_in_the_past_has_no_time_left() {
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
