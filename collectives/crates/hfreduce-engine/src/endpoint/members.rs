//! Validation of a list of members.

use super::info::{Info, digest};
use crate::member::Member;

/// A valid list of members.
pub struct MemberList {
    pub list: Vec<Info>,
    /// Position of this rank in the list.
    pub own: usize,
    /// The list, for messages.
    pub description: String,
}

/// Validates a list that was given to rank `rank` of an epoch with these infos.
pub fn choose(members: &[Member], infos: &[Info], rank: u32) -> Result<MemberList, String> {
    let list = list(members, infos)?;
    let id = infos.get(rank as usize).map(|info| info.id);
    let own = list.iter().position(|info| Some(info.id) == id).ok_or_else(|| {
        format!("rank {rank} is not in the list of members; close() leaves the group")
    })?;
    let description = describe(members, &list);
    Ok(MemberList { list, own, description })
}

fn list(members: &[Member], infos: &[Info]) -> Result<Vec<Info>, String> {
    let mut list: Vec<Info> = Vec::with_capacity(members.len());
    for member in members {
        let info = match member {
            Member::Rank(rank) => {
                let ranks = infos.len();
                infos
                    .get(*rank as usize)
                    .cloned()
                    .ok_or_else(|| format!("rank {rank} is not in an epoch of {ranks} ranks"))?
            }
            Member::Newcomer(bytes) => serde_json::from_slice(bytes)
                .map_err(|error| format!("invalid info of a newcomer: {error}"))?,
        };
        if list.iter().any(|other| other.id == info.id) {
            return Err(format!("{member:?} is in the list twice"));
        }
        list.push(info);
    }
    match members.first() {
        Some(Member::Rank(_)) => Ok(list),
        _ => Err("the first member must be a rank of the present epoch".into()),
    }
}

fn describe(members: &[Member], list: &[Info]) -> String {
    let names = members.iter().zip(list).take(32).map(|(member, info)| match member {
        Member::Rank(rank) => rank.to_string(),
        Member::Newcomer(_) => format!("a newcomer on {}", info.node),
    });
    let more = if members.len() > 32 { ", …" } else { "" };
    format!("[{}{more}]", names.collect::<Vec<_>>().join(", "))
}

/// Digest of the list: equal for equal lists.
pub fn list_digest(list: &[Info]) -> u64 {
    digest(&list.iter().flat_map(|info| info.id.to_le_bytes()).collect::<Vec<_>>())
}
