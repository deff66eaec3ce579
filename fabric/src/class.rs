//! Traffic classes: one enum for the whole project, mapped to three fields on three networks.
//!
//! The InfiniBand Service Level, the RoCE traffic class and the DSCP are set from this table and
//! never derived from each other, because different switches read them (paper section VI-A).

use rustix::fd::AsFd;
use rustix::io;
use serde::{Deserialize, Serialize};

/// Traffic class of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrafficClass {
    /// Control traffic and all traffic without another class.
    Other,
    /// NCCL between GPUs.
    Nccl,
    /// HFReduce between nodes.
    Hfreduce,
    /// 3FS data.
    Storage,
}

/// Values of one class on the three kinds of network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// InfiniBand Service Level, 0..=15.
    pub service_level: u8,
    /// RoCE traffic class: the 8 bits of the GRH field.
    pub roce_traffic_class: u8,
    /// Differentiated services code point of a TCP socket, 0..=63.
    pub dscp: u8,
}

impl TrafficClass {
    /// All classes, in ascending numeric order.
    pub const ALL: [TrafficClass; 4] =
        [TrafficClass::Other, TrafficClass::Nccl, TrafficClass::Hfreduce, TrafficClass::Storage];

    /// Table of the values of each class.
    pub const fn marks(self) -> Marks {
        match self {
            Self::Other => Marks { service_level: 0, roce_traffic_class: 0, dscp: 0 },
            Self::Nccl => Marks { service_level: 1, roce_traffic_class: 104, dscp: 26 },
            Self::Hfreduce => Marks { service_level: 2, roce_traffic_class: 136, dscp: 34 },
            Self::Storage => Marks { service_level: 3, roce_traffic_class: 72, dscp: 18 },
        }
    }

    /// Marks a TCP socket (IPv4 or IPv6) with the class's DSCP.
    ///
    /// # Errors
    /// Returns the error of `setsockopt(IP_TOS)` or `setsockopt(IPV6_TCLASS)`.
    pub fn apply(self, socket: impl AsFd) -> io::Result<()> {
        let tos = self.marks().dscp << 2;
        match rustix::net::getsockname(&socket)?.address_family() {
            rustix::net::AddressFamily::INET6 => {
                // A dual-stack socket may carry IPv4, which has a separate field.
                rustix::net::sockopt::set_ip_tos(&socket, tos)?;
                rustix::net::sockopt::set_ipv6_tclass(&socket, u32::from(tos))
            }
            _ => rustix::net::sockopt::set_ip_tos(&socket, tos),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::net::TcpListener;

    #[test]
    fn every_class_has_distinct_marks() {
        let dscps: BTreeSet<u8> = TrafficClass::ALL.iter().map(|c| c.marks().dscp).collect();
        let levels: BTreeSet<u8> =
            TrafficClass::ALL.iter().map(|c| c.marks().service_level).collect();
        assert_eq!((dscps.len(), levels.len()), (4, 4));
        assert!(dscps.iter().all(|dscp| *dscp < 64) && levels.iter().all(|level| *level < 16));
    }

    #[test]
    fn a_socket_carries_its_dscp() {
        let v4 = TcpListener::bind("127.0.0.1:0").unwrap();
        TrafficClass::Hfreduce.apply(&v4).unwrap();
        assert_eq!(rustix::net::sockopt::ip_tos(&v4).unwrap(), 34 << 2);
        if let Ok(v6) = TcpListener::bind("[::1]:0") {
            TrafficClass::Storage.apply(&v6).unwrap();
            assert_eq!(rustix::net::sockopt::ipv6_tclass(&v6).unwrap(), 18 << 2);
        }
    }
}
