//! C programs: compiled strictly, run as the ranks of a group, ended by a deadline.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(100);
/// Below the ports that the system hands out; the address is the test's own.
const PORT: u16 = 23117;

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).unwrap().to_owned()
}

/// The path at which cargo puts this crate's library: the folder of the test.
pub fn library() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let library = folder.join("libhfreduce.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// Compiles a C program against the header and the shared library; no warning passes.
pub fn compile(source: &Path, into: &Path) -> PathBuf {
    let program = into.join(source.file_stem().unwrap());
    let folder = library().parent().unwrap().to_owned();
    // A sanitizer's runtime, for a library that was built with one.
    let more = std::env::var("TEST_LINK_FLAGS").unwrap_or_default();
    let output = Command::new("cc")
        .args(["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", "-pedantic"])
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"))
        .arg(source)
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(&folder)
        // Before LD_LIBRARY_PATH, in which cargo names folders with libraries of earlier builds.
        .arg(format!("-Wl,--disable-new-dtags,-rpath,{}", folder.display()))
        .arg("-lhfreduce")
        .args(more.split_whitespace())
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// An address that no other test has: loopback is a whole network, and processes have numbers.
pub fn rendezvous() -> (String, u16) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let own = NEXT.fetch_add(1, Ordering::Relaxed) as u16;
    (format!("127.{}.{b}.{c}", 64 + (a & 63)), PORT + own)
}

/// Runs all concurrently; returns their outputs if all succeed in time.
pub fn run(mut ranks: Vec<Command>) -> Vec<String> {
    let records = tempfile::tempdir().unwrap();
    let start = |command: &mut Command| {
        let command = command.env("HFREDUCE_RUN_DIR", records.path());
        let command = command.env("HFREDUCE_DUMP_DIR", records.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut children: Vec<Child> = ranks.iter_mut().map(start).collect();
    let deadline = Instant::now() + DEADLINE;
    while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
        if Instant::now() > deadline {
            children.iter_mut().for_each(|child| drop(child.kill()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let outputs = children.into_iter().map(|child| child.wait_with_output().unwrap());
    let outputs: Vec<_> = outputs.collect();
    for (rank, output) in outputs.iter().enumerate() {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank}: {}: {errors}", output.status);
    }
    outputs.iter().map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).collect()
}
