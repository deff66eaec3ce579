//! Messages of ranks cannot fill the log of a daemon, which all of its users share.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../hfreduce-engine/tests/support/mod.rs"]
mod support;

use std::fmt::Debug;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hfreduce_daemon::AnyEndpoint;
use hfreduce_engine::{ErrorKind, Options};
use support::{Calls, KEY, Served, TIMEOUT, placement, run_at};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

static LINES: AtomicUsize = AtomicUsize::new(0);
static LONGEST: AtomicUsize = AtomicUsize::new(0);

/// Counts log lines instead of writing them.
struct Counting;

struct Bytes(usize);

impl Visit for Bytes {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        self.0 += format!("{value:?}").len();
    }
}

impl Subscriber for Counting {
    fn enabled(&self, about: &Metadata<'_>) -> bool {
        // A rank logs to the log of its process.
        about.target() != "hfreduce_daemon::client::driver"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut bytes = Bytes(0);
        event.record(&mut bytes);
        LINES.fetch_add(1, Ordering::SeqCst);
        LONGEST.fetch_max(bytes.0, Ordering::SeqCst);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn log_lines_are_bounded_whatever_ranks_send() {
    tracing::subscriber::set_global_default(Counting).unwrap();
    let daemon = Served::new(8);
    let long = "x".repeat(1 << 20);
    // The message about an unknown request quotes it.
    let mut stream = UnixStream::connect(&daemon.path).unwrap();
    let request = format!("\"{long}\"");
    stream.write_all(&(request.len() as u32).to_le_bytes()).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let _ = stream.read_to_end(&mut Vec::new());
    // Every error contains names.
    for long_job in [true, false] {
        let mut options = Options::new(0, placement(1, 1));
        match long_job {
            true => options.job = long.clone(),
            false => options.placement[0].0 = long.clone(),
        }
        let refused = AnyEndpoint::open(options, &KEY, Some(&daemon.path)).map(drop).unwrap_err();
        assert_eq!(refused.cause.kind, ErrorKind::Invalid);
        assert!(refused.to_string().contains("1048576 bytes"), "another error");
        assert!(refused.to_string().contains("use shorter names"), "another error");
    }
    // More bytes than are read before a rank is admitted.
    let mut options = Options::new(0, placement(1, 1));
    options.towards = Some("x".repeat(5 << 20));
    assert!(AnyEndpoint::open(options, &KEY, Some(&daemon.path)).is_err());
    run_at(
        &placement(1, 1),
        |_| Some(daemon.path.clone()),
        |_| {},
        |comm| {
            let comm = comm.unwrap();
            comm.abort(&long);
            let result = comm.barrier(TIMEOUT, true).and_then(|work| {
                let _ = work.wait(None);
                comm.barrier(TIMEOUT, true)
            });
            assert!(result.is_err());
        },
    );
    daemon.eventually_empty();
    let (lines, longest) = (LINES.load(Ordering::SeqCst), LONGEST.load(Ordering::SeqCst));
    assert!(lines > 5 && longest < 8 << 10, "{lines} lines, the longest of {longest} bytes");
}
