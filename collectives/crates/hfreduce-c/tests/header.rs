//! The header and the library agree: sizes, offsets, constants, names.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;

use hfreduce::{ErrorRecord, Member, Options, STATUSES, hfr_version};
use hfreduce_engine::{DType, ReduceOp};

fn header() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/hfreduce.h");
    std::fs::read_to_string(path).unwrap()
}

/// C expressions and what they are in Rust.
fn facts() -> Vec<(String, usize)> {
    let mut facts = vec![
        ("sizeof(hfr_options)".to_owned(), size_of::<Options>()),
        ("sizeof(hfr_error)".to_owned(), size_of::<ErrorRecord>()),
        ("sizeof(hfr_member)".to_owned(), size_of::<Member>()),
        ("HFR_VERSION".to_owned(), hfr_version() as usize),
    ];
    macro_rules! offsets {
        ($c:literal, $rust:ty: $($field:ident)*) => {
            $(facts.push((
                format!("offsetof({}, {})", $c, stringify!($field)),
                offset_of!($rust, $field),
            ));)*
        };
    }
    offsets!("hfr_options", Options: size rank world_size rendezvous key key_bytes key_file job
        node zone address topology chunk_bytes connect_seconds liveness_seconds
        determinism);
    offsets!("hfr_error", ErrorRecord: size status rank peer seen_by sequence job node peer_node
        operation phase message);
    offsets!("hfr_member", Member: size rank info info_bytes);
    facts.extend(
        STATUSES.map(|(name, status)| (format!("HFR_{}", name.to_uppercase()), status as usize)),
    );
    facts.extend(
        DType::ALL.map(|d| (format!("HFR_{}", d.name().to_uppercase()), usize::from(d.code()))),
    );
    facts
        .extend(ReduceOp::ALL.map(|op| (format!("HFR_{}", op.name().to_uppercase()), op as usize)));
    facts
}

#[test]
fn sizes_offsets_and_constants_are_the_same() {
    let mut source = "#include <hfreduce.h>\n".to_owned();
    for (expression, value) in facts() {
        writeln!(source, "_Static_assert({expression} == {value}, \"{expression}\");").unwrap();
    }
    source.push_str("int main(void) { return (int)(hfr_version() - HFR_VERSION); }\n");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("facts.c");
    std::fs::write(&file, source).unwrap();
    let program = support::compile(&file, folder.path());
    assert!(Command::new(program).status().unwrap().success());
}

#[test]
fn only_functions_that_the_header_declares_are_exported() {
    let output =
        Command::new("nm").args(["-D", "--defined-only"]).arg(support::library()).output().unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<String> = listed
        .lines()
        .filter_map(|line| Some(line.split_whitespace().nth(2)?.to_owned()))
        .collect();
    let text = header();
    let code = text.split("*/").map(|part| part.split("/*").next().unwrap()).collect::<String>();
    let declared: BTreeSet<String> = code
        .match_indices("hfr_")
        .filter_map(|(at, _)| {
            let rest = &code[at..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
            rest[end..].starts_with('(').then(|| rest[..end].to_owned())
        })
        .filter(|name| name != "hfr_options")
        .collect();
    assert!(declared.len() > 20, "{declared:?}");
    assert_eq!(exported, declared);
}
