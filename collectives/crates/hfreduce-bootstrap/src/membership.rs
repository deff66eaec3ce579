//! Membership of a rank in a group: its rank, and the job's ranks of all members.

use sha2::{Digest, Sha256};

use crate::variables::SettingError;

/// Membership of one rank in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    rank: u32,
    global_ranks: Vec<u32>,
    world_size: u32,
}

impl Membership {
    /// Rank `rank` of a group whose members have `global_ranks` in a job of `world_size` ranks.
    ///
    /// # Errors
    /// [`SettingError`] if `rank` is not below the number of members.
    pub fn new(rank: u32, global_ranks: Vec<u32>, world_size: u32) -> Result<Self, SettingError> {
        if rank as usize >= global_ranks.len() {
            let expected = format!("a number below the {} ranks of the group", global_ranks.len());
            return Err(SettingError::new("RANK", &rank.to_string(), expected));
        }
        Ok(Self { rank, global_ranks, world_size })
    }

    /// Rank `rank` of the group of all ranks.
    ///
    /// # Errors
    /// As for [`Membership::new`].
    pub fn world(rank: u32, world_size: u32) -> Result<Self, SettingError> {
        Self::new(rank, (0..world_size).collect(), world_size)
    }

    /// The rank in this group.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// The job's ranks of all members, in group order.
    pub fn global_ranks(&self) -> &[u32] {
        &self.global_ranks
    }

    /// Number of ranks of the job.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.global_ranks.len()
    }

    /// The rank in the job.
    pub fn global_rank(&self) -> u32 {
        self.global_ranks[self.rank as usize]
    }

    /// Whether the group has all ranks of the job, in order.
    pub fn is_world(&self) -> bool {
        self.global_ranks.iter().copied().eq(0..self.world_size)
    }

    /// Digest of the list of ranks; equal lists have equal digests.
    pub fn digest(&self) -> String {
        let mut sha = Sha256::new();
        for (index, rank) in self.global_ranks.iter().enumerate() {
            sha.update(if index == 0 { rank.to_string() } else { format!(",{rank}") });
        }
        sha.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_that_of_the_ranks_separated_by_commas() {
        // hashlib.sha256(b"0,1,2").hexdigest()[:16]
        assert_eq!(Membership::world(1, 3).unwrap().digest(), "c0be322c1ad6af50");
        let digest = |ranks: &[u32]| Membership::new(0, ranks.to_vec(), 9).unwrap().digest();
        assert_ne!(digest(&[1, 2]), digest(&[2, 1]));
        assert_ne!(digest(&[1, 2]), digest(&[12]));
    }

    #[test]
    fn a_part_of_the_job_is_not_its_world() {
        let member = Membership::new(1, vec![0, 3], 4).unwrap();
        assert_eq!((member.global_rank(), member.size(), member.is_world()), (3, 2, false));
        assert!(Membership::world(1, 4).unwrap().is_world());
        assert!(!Membership::new(0, vec![1, 0], 2).unwrap().is_world());
    }

    #[test]
    fn a_rank_outside_its_group_is_refused() {
        let text = Membership::new(2, vec![4, 5], 8).unwrap_err().to_string();
        assert!(text.contains("RANK") && text.contains("below the 2 ranks"), "{text}");
    }
}
