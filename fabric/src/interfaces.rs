//! Address selection: the addresses at which other nodes reach this node. Configured addresses come
//! first; by default the source address of the route comes first, then the others.
//!
//! [`AddressSelector::select`] is pure: it sorts a list of interfaces. [`interfaces`] and
//! [`source_towards`] query the kernel.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The kernel's limit for the length of an interface name.
const NAME_BYTES_MAX: usize = 15;
/// Name prefixes of virtual interfaces (bridges, tunnels). Other nodes may have the same address
/// there, so these come last, unless the route uses them.
pub const VIRTUAL_PREFIXES: [&str; 14] = [
    "docker", "br-", "cni", "flannel", "cali", "cilium", "lxc", "veth", "virbr", "ifb", "tunl",
    "dummy", "kube", "podman",
];

/// One address of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The interface's name.
    pub name: String,
    /// The address.
    pub address: IpAddr,
    /// True for loopback.
    pub loopback: bool,
}

impl fmt::Display for Interface {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.name, self.address)
    }
}

/// Selected addresses: `10.0.0.5`, `10.0.0.0/8`, `eth0`, `ib*`, `!docker0`, or a comma-separated
/// list in order of preference. Default: all addresses except loopback, in order of preference.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AddressSelector(Vec<Term>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Term {
    excluded: bool,
    of: Of,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Of {
    Address(IpAddr),
    Network(IpAddr, u8),
    Name(String),
}

/// A selector that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid selector `{0}`: expected an address (10.0.0.5), network (10.0.0.0/8), interface (eth0, ib*) or exclusion (!docker0)"
)]
pub struct InvalidSelector(String);

/// No interface matches the selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no interface that is up matches `{selector}`; available: {there}")]
pub struct NoMatchingInterface {
    selector: String,
    there: String,
}

impl FromStr for AddressSelector {
    type Err = InvalidSelector;

    fn from_str(text: &str) -> Result<Self, InvalidSelector> {
        text.split(',').map(Term::read).collect::<Result<_, _>>().map(Self)
    }
}

impl TryFrom<String> for AddressSelector {
    type Error = InvalidSelector;

    fn try_from(text: String) -> Result<Self, InvalidSelector> {
        if text.is_empty() { Ok(Self::default()) } else { text.parse() }
    }
}

impl From<AddressSelector> for String {
    fn from(selector: AddressSelector) -> Self {
        selector.to_string()
    }
}

impl From<IpAddr> for AddressSelector {
    fn from(address: IpAddr) -> Self {
        Self(vec![Term { excluded: false, of: Of::Address(address) }])
    }
}

impl fmt::Display for AddressSelector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, term) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            let not = if term.excluded { "!" } else { "" };
            match &term.of {
                Of::Address(address) => write!(formatter, "{comma}{not}{address}")?,
                Of::Network(base, bits) => write!(formatter, "{comma}{not}{base}/{bits}")?,
                Of::Name(glob) => write!(formatter, "{comma}{not}{glob}")?,
            }
        }
        Ok(())
    }
}

impl Term {
    fn read(text: &str) -> Result<Self, InvalidSelector> {
        let text = text.trim();
        let (excluded, rest) = match text.strip_prefix('!') {
            Some(rest) => (true, rest.trim()),
            None => (false, text),
        };
        let of = Of::read(rest).ok_or_else(|| InvalidSelector(text.to_owned()))?;
        Ok(Self { excluded, of })
    }
}

impl Of {
    fn read(text: &str) -> Option<Self> {
        if let Ok(address) = text.parse() {
            return Some(Self::Address(address));
        }
        if let Some((base, bits)) = text.split_once('/') {
            let (base, bits): (IpAddr, u8) = (base.parse().ok()?, bits.parse().ok()?);
            let most = if base.is_ipv4() { 32 } else { 128 };
            return (bits <= most).then_some(Self::Network(base, bits));
        }
        let is_valid_length = !text.is_empty() && text.len() <= NAME_BYTES_MAX;
        let plain = text.chars().all(|c| !c.is_whitespace() && !c.is_control() && c != '!');
        (is_valid_length && plain).then(|| Self::Name(text.to_owned()))
    }

    fn fits(&self, one: &Interface) -> bool {
        match self {
            // All of 127.0.0.0/8 is local, whether or not it is listed.
            Self::Address(IpAddr::V4(address)) if address.is_loopback() => {
                one.loopback && one.address.is_ipv4()
            }
            Self::Address(address) => *address == one.address,
            Self::Network(base, bits) => same_network(*base, one.address, *bits),
            Self::Name(glob) => is_like(glob.as_bytes(), one.name.as_bytes()),
        }
    }

    /// The address of `one` that the selector refers to.
    fn of(&self, one: &Interface) -> Interface {
        match self {
            Self::Address(address) => Interface { address: *address, ..one.clone() },
            _ => one.clone(),
        }
    }
}

impl AddressSelector {
    /// True if the selector is empty.
    pub fn is_default(&self) -> bool {
        self.0.is_empty()
    }

    /// The selected interfaces in order of preference. `route` is the source address that the
    /// kernel uses towards the peers.
    ///
    /// # Errors
    /// [`NoMatchingInterface`] if no interface matches.
    pub fn select(
        &self,
        interfaces: &[Interface],
        route: Option<IpAddr>,
    ) -> Result<Vec<Interface>, NoMatchingInterface> {
        let mut all = interfaces.to_vec();
        all.sort_by_key(|one| one.rank(route));
        let mut selected: Vec<Interface> = Vec::new();
        for of in self.0.iter().filter(|term| !term.excluded).map(|term| &term.of) {
            for interface in
                all.iter().filter(|interface| of.fits(interface)).map(|interface| of.of(interface))
            {
                if !selected.iter().any(|other| other.address == interface.address) {
                    selected.push(interface);
                }
            }
        }
        if self.0.iter().all(|term| term.excluded) {
            selected = all.clone();
        }
        selected.retain(|one| !self.0.iter().any(|term| term.excluded && term.of.fits(one)));
        if self.0.iter().all(|term| term.excluded) && selected.iter().any(|one| !one.loopback) {
            selected.retain(|one| !one.loopback);
        }
        if selected.is_empty() && !self.is_default() {
            let there: Vec<String> = all.iter().map(ToString::to_string).collect();
            let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
            return Err(NoMatchingInterface { selector: self.to_string(), there });
        }
        Ok(selected)
    }
}

impl Interface {
    /// Sort key; lower is preferred.
    fn rank(&self, route: Option<IpAddr>) -> (bool, bool, bool, bool) {
        let inward = VIRTUAL_PREFIXES.iter().any(|prefix| self.name.starts_with(prefix));
        (self.loopback, route != Some(self.address), inward, self.address.is_ipv6())
    }
}

fn same_network(base: IpAddr, address: IpAddr, bits: u8) -> bool {
    let (differ, width) = match (base, address) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits() ^ b.to_bits()), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits(), 128),
        _ => return false,
    };
    differ.checked_shr(width - u32::from(bits)).unwrap_or(0) == 0
}

/// `*` matches any number of bytes, `?` matches one byte.
fn is_like(glob: &[u8], name: &[u8]) -> bool {
    match glob {
        [] => name.is_empty(),
        [b'*', rest @ ..] => (0..=name.len()).any(|at| is_like(rest, &name[at..])),
        [b'?', rest @ ..] => !name.is_empty() && is_like(rest, &name[1..]),
        [first, rest @ ..] => name.first() == Some(first) && is_like(rest, &name[1..]),
    }
}

/// Source address of this node towards `host`, or of the default route if `host` is unknown or this
/// node itself. Sends no packet: the kernel looks up its routes.
pub fn source_towards(host: Option<&str>) -> Option<IpAddr> {
    // Documentation addresses: they are not assigned, so the default route leads there.
    let anywhere = [
        IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
        IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
    ];
    let host_addresses = host.map(|host| (host, 0).to_socket_addrs().into_iter().flatten());
    let host_addresses = host_addresses.into_iter().flatten().map(|address| address.ip());
    host_addresses.chain(anywhere).filter_map(source).find(|source| !source.is_loopback())
}

/// Source address that the kernel uses towards a peer; the peer's own address if that is one of
/// this machine. Sends no packet.
pub(crate) fn source(peer: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    // Port 9 is the discard service; nothing is sent.
    socket.connect((peer, 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// The IPv4 and global IPv6 addresses of every interface that is up.
pub fn interfaces() -> Vec<Interface> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: getifaddrs fills `list` or fails; it is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let mut interfaces = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: this function owns the list until freeifaddrs, and `at` is one of its entries.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        let up = entry.ifa_flags & libc::IFF_UP as u32 != 0;
        let loopback = entry.ifa_flags & libc::IFF_LOOPBACK as u32 != 0;
        if entry.ifa_addr.is_null() || entry.ifa_name.is_null() || !up {
            continue;
        }
        // SAFETY: a name from getifaddrs is null-terminated and is valid as long as the list.
        let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
        let name = name.to_string_lossy().into_owned();
        // SAFETY: a non-null address starts with its family, which identifies its type.
        let address = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: checked by the family; read unaligned, since alignment is not guaranteed.
                let address =
                    unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                IpAddr::from(address.sin_addr.s_addr.to_ne_bytes())
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let address =
                    unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                let address = Ipv6Addr::from(address.sin6_addr.s6_addr);
                if address.is_unicast_link_local() {
                    continue;
                }
                IpAddr::from(address)
            }
            _ => continue,
        };
        interfaces.push(Interface { name, address, loopback });
    }
    // SAFETY: `list` was returned by getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    interfaces
}

#[cfg(test)]
#[path = "interfaces_test.rs"]
mod tests;
