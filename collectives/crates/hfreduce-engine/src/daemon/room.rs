//! How much memory and how many descriptors this process may use.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of descriptors to the hard one, and tells that one: what strangers take
/// for a moment at the port of one rank is not missing elsewhere.
pub fn most_descriptors() -> usize {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    let limit = getrlimit(Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// Bytes: what the machine has, or what the control groups of this process allow if that is less.
/// `usize::MAX` where neither is known.
pub fn memory_bytes() -> usize {
    let read = |path: PathBuf| std::fs::read_to_string(path).ok();
    let group = read("/proc/self/cgroup".into()).unwrap_or_default();
    let limits = limit_files(&group).into_iter().filter_map(read);
    let limits = limits.filter_map(|text| text.trim().parse::<usize>().ok());
    let told = read("/proc/meminfo".into()).unwrap_or_default();
    let total = told.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let total = total.and_then(|line| line.trim().strip_suffix(" kB"));
    let total = total.and_then(|count| count.parse::<usize>().ok());
    limits.chain(total.map(|kilobytes| kilobytes << 10)).min().unwrap_or(usize::MAX)
}

/// Where limits may be, given what `/proc/self/cgroup` says: of control groups of version 2, of this
/// process's group and all above it; of version 1, of a container's.
fn limit_files(group: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let own = group.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let groups = Path::new(own).ancestors().map(|group| root.join(group).join("memory.max"));
    groups.chain([root.join("memory/memory.limit_in_bytes")]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_all_groups_above_count() {
        let files = limit_files("1:name=systemd:/x\n0::/user.slice/a\n");
        let at = |file: &str| Path::new("/sys/fs/cgroup").join(file);
        let groups = ["user.slice/a/memory.max", "user.slice/memory.max", "memory.max"];
        assert_eq!(files[..3], groups.map(at));
        assert_eq!(limit_files("")[0], at("memory.max"));
        assert!(memory_bytes() > 1 << 20);
    }
}
