//! C programs as ranks of a group: the example, every operation, and the exit of a rank.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use std::path::Path;
use std::process::Command;

use support::{compile, rendezvous, root, run};

fn of_tests(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name)
}

/// Ranks that get rank, number of ranks and address as arguments.
fn ranks(program: &Path, count: u32) -> Vec<Command> {
    let (host, port) = rendezvous();
    let command = |rank: u32| {
        let mut command = Command::new(program);
        command.args([rank.to_string(), count.to_string(), format!("{host}:{port}")]);
        command
    };
    (0..count).map(command).collect()
}

#[test]
fn the_example_runs_with_four_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&root().join("examples/c/allreduce.c"), folder.path());
    let key = folder.path().join("key");
    std::fs::write(&key, "a key of sixteen bytes or more").unwrap();
    let (host, port) = rendezvous();
    let command = |rank: u32| {
        let mut command = Command::new(&program);
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "4")
            .env("MASTER_ADDR", &host)
            .env("MASTER_PORT", port.to_string())
            .env("HFREDUCE_KEY_FILE", &key)
            .env_remove("FLYER_TOPOLOGY")
            .env_remove("HFREDUCE_RENDEZVOUS");
        command
    };
    let outputs = run((0..4).map(command).collect());
    let expected: Vec<String> = (0..4).map(|rank| format!("rank {rank} of 4: 10\n")).collect();
    assert_eq!(outputs, expected);
}

#[test]
fn without_an_environment_the_example_names_the_missing_variable() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&root().join("examples/c/allreduce.c"), folder.path());
    let output = Command::new(program).env_clear().output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("WORLD_SIZE"), "{errors}");
}

#[test]
fn every_operation_and_every_refusal() {
    let folder = tempfile::tempdir().unwrap();
    run(ranks(&compile(&of_tests("collectives.c"), folder.path()), 4));
}

/// The same program with other limits on open files.
fn limited(command: &Command, soft: u32, hard: u32) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit -Sn {soft}; ulimit -Hn {hard}; exec \"$0\" \"$@\""));
    shell.arg(command.get_program()).args(command.get_args());
    shell
}

#[test]
fn a_low_soft_limit_of_open_files_is_raised() {
    let folder = tempfile::tempdir().unwrap();
    let ranks = ranks(&compile(&of_tests("collectives.c"), folder.path()), 4);
    run(ranks.iter().map(|rank| limited(rank, 10, 500)).collect());
}

#[test]
fn a_low_hard_limit_of_open_files_is_named_before_anything_is_connected() {
    let folder = tempfile::tempdir().unwrap();
    let ranks = ranks(&compile(&of_tests("death.c"), folder.path()), 1024);
    // One rank alone: it fails without waiting for the others.
    for rank in [0, 1] {
        let output = limited(&ranks[rank], 100, 1024).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        let parts = ["a group of 1024 ranks needs 20", "limit is 1024", "ulimit -n 20"];
        assert!(parts.iter().all(|part| errors.contains(part)), "{errors}");
    }
}

#[test]
fn a_rank_that_exits_is_reported_by_the_others() {
    let folder = tempfile::tempdir().unwrap();
    run(ranks(&compile(&of_tests("death.c"), folder.path()), 3));
}

#[test]
fn a_newcomer_takes_the_place_of_a_rank_that_ended() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&of_tests("newcomer.c"), folder.path());
    let ((host, port), info) = (rendezvous(), folder.path().join("info"));
    let command = |role: u32| {
        let mut command = Command::new(&program);
        command.args([role.to_string(), format!("{host}:{port}")]).arg(&info);
        command
    };
    run((0..3).map(command).collect());
}
