//! The header, the library and the public interface of 3FS agree.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::BTreeSet;
use std::fmt::Write;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use hf3fs_api_shared::{Cqe, Ior, Iov};

fn include() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

/// C expressions, their values here, and in the public interface on 64-bit Linux.
fn facts() -> Vec<(&'static str, usize, usize)> {
    vec![
        ("sizeof(struct hf3fs_iov)", size_of::<Iov>(), 312),
        ("offsetof(struct hf3fs_iov, base)", offset_of!(Iov, base), 0),
        ("offsetof(struct hf3fs_iov, iovh)", offset_of!(Iov, iovh), 8),
        ("offsetof(struct hf3fs_iov, id)", offset_of!(Iov, id), 16),
        ("offsetof(struct hf3fs_iov, mount_point)", offset_of!(Iov, mount_point), 32),
        ("offsetof(struct hf3fs_iov, size)", offset_of!(Iov, size), 288),
        ("offsetof(struct hf3fs_iov, block_size)", offset_of!(Iov, block_size), 296),
        ("offsetof(struct hf3fs_iov, numa)", offset_of!(Iov, numa), 304),
        ("sizeof(struct hf3fs_ior)", size_of::<Ior>(), 600),
        ("offsetof(struct hf3fs_ior, iov)", offset_of!(Ior, iov), 0),
        ("offsetof(struct hf3fs_ior, iorh)", offset_of!(Ior, iorh), 312),
        ("offsetof(struct hf3fs_ior, mount_point)", offset_of!(Ior, mount_point), 320),
        ("offsetof(struct hf3fs_ior, for_read)", offset_of!(Ior, for_read), 576),
        ("offsetof(struct hf3fs_ior, io_depth)", offset_of!(Ior, io_depth), 580),
        ("offsetof(struct hf3fs_ior, priority)", offset_of!(Ior, priority), 584),
        ("offsetof(struct hf3fs_ior, timeout)", offset_of!(Ior, timeout), 588),
        ("offsetof(struct hf3fs_ior, flags)", offset_of!(Ior, flags), 592),
        ("sizeof(struct hf3fs_cqe)", size_of::<Cqe>(), 24),
        ("offsetof(struct hf3fs_cqe, result)", offset_of!(Cqe, result), 8),
        ("offsetof(struct hf3fs_cqe, userdata)", offset_of!(Cqe, userdata), 16),
        ("HF3FS_SUPER_MAGIC", threefs_rings::control::MAGIC as usize, 0x8f3f_5fff),
        ("HF3FS_IOR_ALLOW_READ_UNCOMMITTED", 1, 1),
        ("HF3FS_IOR_FORBID_READ_HOLES", 2, 2),
        ("HF3FS_MEM_MANAGED", 2, 2),
    ]
}

#[test]
fn structures_have_the_public_layout() {
    let mut source = "#include <hf3fs_usrbio.h>\n".to_owned();
    for (expression, here, public) in facts() {
        assert_eq!(here, public, "{expression}");
        writeln!(source, "_Static_assert({expression} == {public}, \"{expression}\");").unwrap();
    }
    source.push_str("int main(void) { return 0; }\n");
    let folder = tempfile::tempdir().unwrap();
    for (name, standard) in [("facts.c", "-std=c11"), ("facts.cc", "-std=c++17")] {
        let file = folder.path().join(name);
        let source = match name {
            "facts.cc" => source.replace("_Static_assert", "static_assert"),
            _ => source.clone(),
        };
        std::fs::write(&file, source).unwrap();
        let done = Command::new("cc")
            .args([standard, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I"])
            .arg(include())
            .arg(&file)
            .output()
            .expect("a C compiler");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
}

/// Functions of the public interface.
const PUBLIC: [&str; 27] = [
    "hf3fs_dereg_fd",
    "hf3fs_extract_mount_point",
    "hf3fs_gdr_available",
    "hf3fs_gdr_device_count",
    "hf3fs_hardlink",
    "hf3fs_io_entries",
    "hf3fs_ior_size",
    "hf3fs_iorcreate",
    "hf3fs_iorcreate2",
    "hf3fs_iorcreate3",
    "hf3fs_iorcreate4",
    "hf3fs_iordestroy",
    "hf3fs_iov_device_id",
    "hf3fs_iov_mem_type",
    "hf3fs_iovcreate",
    "hf3fs_iovcreate_device",
    "hf3fs_iovdestroy",
    "hf3fs_iovopen",
    "hf3fs_iovsync",
    "hf3fs_iovunlink",
    "hf3fs_iovwrap",
    "hf3fs_is_hf3fs",
    "hf3fs_prep_io",
    "hf3fs_punchhole",
    "hf3fs_reg_fd",
    "hf3fs_submit_ios",
    "hf3fs_wait_for_ios",
];

#[test]
fn exactly_the_public_functions_are_declared_and_exported() {
    let public: BTreeSet<String> = PUBLIC.iter().map(ToString::to_string).collect();
    let library = std::env::current_exe().unwrap().with_file_name("libhf3fs_api_shared.so");
    let done = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output().unwrap();
    let listed = String::from_utf8(done.stdout).unwrap();
    let exported: BTreeSet<String> = listed
        .lines()
        .filter_map(|line| Some(line.split_whitespace().nth(2)?.to_owned()))
        .collect();
    assert_eq!(exported, public);
    let text = std::fs::read_to_string(include().join("hf3fs_usrbio.h")).unwrap();
    let code = text.split("*/").map(|part| part.split("/*").next().unwrap()).collect::<String>();
    let declared: BTreeSet<String> = code
        .match_indices("hf3fs_")
        .filter_map(|(at, _)| {
            let rest = &code[at..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
            rest[end..].starts_with('(').then(|| rest[..end].to_owned())
        })
        .collect();
    assert_eq!(declared, public);
}
