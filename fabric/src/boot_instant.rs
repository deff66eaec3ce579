//! Instants of CLOCK_BOOTTIME, which also counts while the node is suspended.
//!
//! `Instant` does not advance during suspend, so a lease of a few seconds would last as long as the
//! node sleeps. Leases and other time limits that protect other processes use this clock.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// An instant of CLOCK_BOOTTIME. Only instants of one node are comparable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootInstant(Duration);

impl BootInstant {
    /// The current time.
    pub fn now() -> Self {
        let time = clock_gettime(ClockId::Boottime);
        // Neither is negative: the clock counts from boot.
        let (seconds, nanoseconds) = (time.tv_sec as u64, time.tv_nsec as u32);
        Self(Duration::new(seconds, nanoseconds))
    }

    /// The instant `duration` later; saturates.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }

    /// Time since `earlier`; zero if `earlier` is in the future.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Time until this instant; zero once it has passed.
    pub fn remaining(self) -> Duration {
        self.since(Self::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        let first = BootInstant::now();
        let later = first.after(Duration::from_secs(60));
        assert_eq!(later.since(first), Duration::from_secs(60));
        assert_eq!(first.since(later), Duration::ZERO);
        assert!(later.remaining() > Duration::from_secs(1));
        assert!(BootInstant::now() >= first);
        assert!(first.after(Duration::MAX) > later);
    }

    /// A time namespace shifts only the clock that counts suspend, as a suspended node does.
    #[test]
    fn the_clock_advances_while_the_machine_is_suspended() {
        let here = BootInstant::now().0.as_secs();
        let output = std::process::Command::new("unshare")
            .args(["--time", "--boottime", "100000", "--fork"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "boot_instant::tests::prints_the_clock", "--ignored", "--nocapture"])
            .output();
        let output = output.map(|it| String::from_utf8_lossy(&it.stdout).into_owned());
        let output = output.unwrap_or_default();
        let Some((_, clock)) = output.split_once("it shows ") else {
            eprintln!("no time namespaces here (they need root)");
            return;
        };
        let there: u64 = clock.split_whitespace().next().unwrap().parse().unwrap();
        assert!(there >= here + 100_000, "here {here} s, there {there} s");
    }

    #[test]
    #[ignore = "run by the test above, in a time namespace"]
    fn prints_the_clock() {
        println!("it shows {} s", BootInstant::now().0.as_secs());
    }
}
