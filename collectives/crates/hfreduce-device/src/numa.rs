//! NUMA placement of pinned memory: near the GPU, so that copies do not cross the processors' interconnect.

use std::path::Path;

/// `MPOL_PREFERRED` of `linux/mempolicy.h`: this node if it has free memory, then the nearest.
const PREFERRED: libc::c_ulong = 1;
const NODES_MAX: usize = 1024;

/// The NUMA node of a PCI device, if the host has several and reports it.
pub fn node_of(pci: &str, sysfs: &Path) -> Option<usize> {
    let path = sysfs.join("bus/pci/devices").join(pci).join("numa_node");
    let text = std::fs::read_to_string(path).ok()?;
    // -1: unknown to the firmware.
    text.trim().parse::<usize>().ok().filter(|node| *node < NODES_MAX)
}

/// Requests pages of this node for an address range; the pages must not have been accessed yet.
///
/// # Errors
/// The kernel's error: containers may forbid the call, and the placement is then arbitrary.
pub fn prefer(address: usize, bytes: usize, node: usize) -> std::io::Result<()> {
    const WORD: usize = libc::c_ulong::BITS as usize;
    let mut mask = [0 as libc::c_ulong; NODES_MAX / WORD];
    let Some(word) = mask.get_mut(node / WORD) else {
        return Err(std::io::ErrorKind::InvalidInput.into());
    };
    *word |= 1 << (node % WORD);
    // SAFETY: the kernel reads the mask and changes only the policy of these addresses.
    let status = unsafe {
        libc::syscall(libc::SYS_mbind, address, bytes, PREFERRED, mask.as_ptr(), NODES_MAX, 0)
    };
    if status == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numa_node_is_read_from_sysfs() {
        let sysfs = tempfile::tempdir().unwrap();
        let device = sysfs.path().join("bus/pci/devices/0000:c1:00.0");
        std::fs::create_dir_all(&device).unwrap();
        assert_eq!(node_of("0000:c1:00.0", sysfs.path()), None);
        for (content, node) in [("3\n", Some(3)), ("-1\n", None), ("x", None), ("99999", None)] {
            std::fs::write(device.join("numa_node"), content).unwrap();
            assert_eq!(node_of("0000:c1:00.0", sysfs.path()), node, "{content}");
        }
    }

    #[test]
    fn an_invalid_numa_node_is_refused() {
        assert!(prefer(0, 4096, NODES_MAX).is_err());
    }
}
