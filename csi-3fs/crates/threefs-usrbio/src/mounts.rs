//! Mount points of 3FS.

use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use threefs_rings::control::{MAGIC, VIRTUAL_DIRECTORY};

use crate::control;

const FILE_SYSTEM: &[u8] = b"fuse.hf3fs";
/// Set to `yes`, mounts of any type are considered.
const ANY_TYPE: &str = "HF3FS_USRBIO_DONT_CHECKFS_FOR_MP";

/// Whether a descriptor is of a file of 3FS.
pub fn is_3fs(fd: RawFd) -> bool {
    control::magic(fd) == Ok(MAGIC)
}

/// The mount point of 3FS that contains a path; `None` if there is none. The last part of the path
/// need not exist.
pub fn extract_mount_point(path: &Path) -> Option<PathBuf> {
    let path = path.canonicalize().ok().or_else(|| {
        let folder = match path.parent()? {
            empty if empty.as_os_str().is_empty() => Path::new("."),
            folder => folder,
        };
        Some(folder.canonicalize().ok()?.join(path.file_name()?))
    })?;
    let any_type = std::env::var_os(ANY_TYPE).is_some_and(|value| value == "yes");
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    let mut points: Vec<PathBuf> = mount_points(&table, any_type)
        .into_iter()
        .filter(|point| path.starts_with(point))
        .collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    points.into_iter().find(|point| point.join(VIRTUAL_DIRECTORY).is_dir())
}

/// Mount points in the kernel's table.
fn mount_points(table: &[u8], any_type: bool) -> Vec<PathBuf> {
    let mut points = Vec::new();
    for line in table.split(|byte| *byte == b'\n') {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let dash = fields.iter().position(|field| *field == b"-");
        let kind = dash.and_then(|dash| fields.get(dash + 1));
        let (Some(kind), Some(point)) = (kind, fields.get(4)) else { continue };
        if !any_type && *kind != FILE_SYSTEM {
            continue;
        }
        let point = PathBuf::from(unescape(point));
        // The virtual directory may be mounted separately.
        if point.file_name() == Some(OsStr::new(VIRTUAL_DIRECTORY)) {
            points.extend(point.parent().map(Path::to_path_buf));
        } else {
            points.push(point);
        }
    }
    points
}

/// Decodes the table's octal escapes.
fn unescape(field: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, next)) = rest.split_first() {
        let digits =
            next.get(..3).filter(|digits| digits.iter().all(|it| (b'0'..b'8').contains(it)));
        match digits {
            Some(digits) if *first == b'\\' => {
                let value = digits.iter().fold(0u32, |value, it| value * 8 + u32::from(it - b'0'));
                plain.push(value as u8);
                rest = &next[3..];
            }
            _ => {
                plain.push(*first);
                rest = next;
            }
        }
    }
    OsString::from_vec(plain)
}

/// Bytes of a path for C.
pub(crate) fn path_bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/sda rw\n\
        36 22 0:52 / /mnt/with\\040space rw shared:1 - fuse.hf3fs 3fs rw\n\
        37 22 0:53 /3fs-virt /data/3fs-virt rw - fuse.hf3fs 3fs rw\n\
        38 22 0:54 / /other rw - fuse.sshfs host rw\n\
        a line without fields\n";

    #[test]
    fn mounts_of_3fs_are_found_by_their_type() {
        let expected: Vec<PathBuf> = ["/mnt/with space", "/data"].map(PathBuf::from).into();
        assert_eq!(mount_points(TABLE, false), expected);
        assert_eq!(mount_points(TABLE, true).len(), 4);
    }

    #[test]
    fn a_path_outside_3fs_has_no_mount_point() {
        assert_eq!(extract_mount_point(Path::new("/dev/zero")), None);
        assert_eq!(extract_mount_point(Path::new("/no/such/folder/file")), None);
        assert!(!is_3fs(0) && !is_3fs(-1));
    }
}
