//! The programs and the command of the page are compiled and run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use std::process::Command;

use support::{compile, library, rendezvous, root};

fn blocks(language: &str) -> Vec<String> {
    let page = std::fs::read_to_string(root().join("docs/reference/hfreduce-c.md")).unwrap();
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

#[test]
fn programs_of_the_page_run() {
    let folder = tempfile::tempdir().unwrap();
    let shown = blocks("c");
    assert_eq!(shown.len(), 2);
    for (number, text) in shown.iter().enumerate() {
        let source = folder.path().join(format!("block{number}.c"));
        std::fs::write(&source, text).unwrap();
        let (host, port) = rendezvous();
        let result = Command::new(compile(&source, folder.path()))
            .env_clear()
            .env("RANK", "0")
            .env("WORLD_SIZE", "1")
            .env("MASTER_ADDR", host)
            .env("MASTER_PORT", port.to_string())
            .output()
            .unwrap();
        assert!(result.status.success(), "{number}: {}", String::from_utf8_lossy(&result.stderr));
    }
}

#[test]
fn the_command_of_the_page_compiles_the_example() {
    let folder = tempfile::tempdir().unwrap();
    let [shown] = blocks("sh").try_into().unwrap();
    let command = shown.lines().find(|line| line.starts_with("cc ")).unwrap();
    let output = folder.path().join("allreduce");
    let words = command.split_whitespace().skip(1).map(|word| match word {
        "target/release" => library().parent().unwrap().display().to_string(),
        "allreduce" => output.display().to_string(),
        word => word.to_owned(),
    });
    let result = Command::new("cc").args(words).current_dir(root()).output().unwrap();
    assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
    assert!(output.exists());
}
